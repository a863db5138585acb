#!/usr/bin/env bash
# Installs the servers that the tests start for themselves: PostgreSQL and Redis, from Debian's packages. Does nothing when
# both are there. The services that the packages bring are not started: the tests run servers of their own.
set -euo pipefail

missing=()
command -v postgres >/dev/null || compgen -G '/usr/lib/postgresql/*/bin/postgres' >/dev/null || missing+=(postgresql)
command -v redis-server >/dev/null || missing+=(redis-server)
if [ ${#missing[@]} = 0 ]; then
    exit 0
fi
if ! command -v apt-get >/dev/null; then
    echo "The tests need PostgreSQL and Redis, here is no apt-get, and these are missing: ${missing[*]}" >&2
    echo "Install them so that 'postgres', 'initdb' and 'redis-server' are on the path, and run this command again." >&2
    exit 1
fi
if [ "$(id -u)" != 0 ]; then
    echo "The tests need PostgreSQL and Redis. Install them and run this command again:" >&2
    echo "    sudo apt-get install ${missing[*]}" >&2
    exit 1
fi

echo "Installing ${missing[*]}"
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy" # 101: the package must not start its service
    chmod 755 "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
