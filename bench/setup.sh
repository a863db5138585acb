#!/bin/sh
# Makes one virtual environment per peer under peers/venvs: setup.sh [NAME...], all of them without a name.
# Needs python3 with venv and pip. Versions are those of the day. A peer that cannot be installed is left out.
set -u
here=$(cd "$(dirname "$0")" && pwd)
wanted=" $* "
mk() {
    n=$1; shift
    case "$wanted" in "  ") ;; *" $n "*) ;; *) return 0 ;; esac
    echo "setting up $n"
    [ -x "$here/peers/venvs/$n/bin/python" ] || python3 -m venv "$here/peers/venvs/$n" || return 0
    "$here/peers/venvs/$n/bin/pip" install -q --disable-pip-version-check "$@" && touch "$here/peers/venvs/$n/ready" ||
        echo "$n could not be installed" >&2
}
mkdir -p "$here/peers/venvs"
mk pai 'pydantic-ai-slim[openai,anthropic,google]'
mk langgraph langgraph langgraph-checkpoint-sqlite
mk oaiagents openai-agents
mk adk google-adk
mk burr 'apache-burr[tracking]' aiosqlite
mk liw llama-index-workflows
mk agno agno openai sqlalchemy greenlet aiosqlite
mk dbos dbos 'psycopg[binary]'
