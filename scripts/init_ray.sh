#!/usr/bin/env bash
# Makes this machine a worker of a Ray cluster: installs the package and its requirements, then
# starts Ray.
#
#   init_ray.sh --address HOST:PORT [--python 3.11] [--restart] [-- arguments of `ray start`]
#
# Ray's token is passed in the environment: in RAY_AUTH_TOKEN, or in a file that only its owner can
# read, named by RAY_AUTH_TOKEN_PATH.  It is never passed as an argument, since every user of a
# machine can see those.
#
# --restart   first ends the Ray processes that an earlier call started here
# --python    the driver's Python version, which must match here up to the minor number
#
# The virtual environment is MESH_TRANSFORMER_VENV (default ~/.mesh-transformer/venv).
set -euo pipefail

fail() {
    echo "error: $1" >&2
    exit 2
}

address="" python="3" restart=""
while [ $# -gt 0 ]; do
    case "$1" in
        --address | --python) [ $# -ge 2 ] || fail "$1 needs a value" ;;&
        --address) address=$2; shift 2 ;;
        --python) python=$2; shift 2 ;;
        --restart) restart=yes; shift ;;
        --) shift; break ;;
        *) fail "unknown argument $1; see the top of init_ray.sh for usage" ;;
    esac
done
case "$address" in
    *:*) ;;
    *) fail "--address is '$address'; give the Ray head's HOST:PORT" ;;
esac

export RAY_AUTH_MODE=token RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL=minor RAY_worker_niceness=0
if [ -z "${RAY_AUTH_TOKEN:-}" ]; then
    token_file=${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}
    [ -s "$token_file" ] || fail "no Ray token: set RAY_AUTH_TOKEN, or put it into $token_file"
    case "$(stat -c %a "$token_file")" in
        ?00) ;;
        *) fail "$token_file can be read by others; run: chmod 600 $token_file" ;;
    esac
    # Ray's processes change their working directory, so the path must be absolute.
    RAY_AUTH_TOKEN_PATH=$(realpath "$token_file")
    export RAY_AUTH_TOKEN_PATH
fi

package=$(cd "$(dirname "$0")/.." && pwd)
venv=${MESH_TRANSFORMER_VENV:-$HOME/.mesh-transformer/venv}
stamp=$venv/installed
session=$(dirname "$venv")/ray_session # holds "BOOT_ID NUMBER" of the process session that runs Ray
wanted="$python $(cat "$package"/requirements.txt "$package"/requirements-libtpu.txt \
    "$package/setup.py" | sha256sum)"

make_venv() {
    rm -rf "$venv"
    mkdir -p "$(dirname "$venv")"
    if command -v "python$python" > /dev/null && "python$python" -c 'import ensurepip'; then
        "python$python" -m venv "$venv"
    else
        # A TPU's image has an older Python and may lack venv; uv installs the driver's version.
        PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet --user uv
        python3 -m uv venv --quiet --seed --python "$python" "$venv"
    fi
}

if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
    make_venv
    pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
    # Installs only packages with pinned hashes; jax and libtpu together are jax[tpu].
    "${pip[@]}" --require-hashes -r "$package/requirements.txt"
    "${pip[@]}" --require-hashes --no-deps -r "$package/requirements-libtpu.txt"
    "${pip[@]}" --no-deps --no-build-isolation -e "$package"
    echo "$wanted" > "$stamp.new"
    mv "$stamp.new" "$stamp"
fi

boot=$(cat /proc/sys/kernel/random/boot_id) # session numbers repeat after a reboot

# Kills what the last start left running.  `ray stop` would also end other users' Ray, but would not
# end stopped workers.
end_session() {
    if [ -s "$session" ]; then
        read -r its_boot number < "$session"
        if [ "$its_boot" = "$boot" ]; then pkill -KILL -s "$number" || true; fi
    fi
}

if [ -n "$restart" ]; then end_session; fi
start=("$venv/bin/ray" start --address "$address" --resources '{"tpu": 1}' --disable-usage-stats)
# Processes are requested by host.  Without this, Ray would start one idle process per CPU.
start+=(--num-cpus 0)
# This machine may have several addresses; use the one that the driver connected to.
read -r _ _ here _ <<< "${SSH_CONNECTION:-}"
if [ -n "$here" ]; then start+=(--node-ip-address "$here"); fi
# File descriptor 9 is the lock that a driver's command holds while it runs; what Ray leaves running
# must not hold it.  A later start finds the session by the lock until the lock is closed, and from
# then on by the session's number.
begin='echo "$0 $$" > "$1"; exec "${@:2}" 9>&-'
start=(setsid --wait bash -c "$begin" "$boot" "$session" "${start[@]}")
if ! "${start[@]}" "$@"; then
    # Ray gives its processes 30 s to start, which a machine that has just booted may exceed once.
    end_session
    "${start[@]}" "$@"
fi
