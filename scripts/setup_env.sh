#!/usr/bin/env bash
# Creates .venv and installs the package with what `make demo` or `make test` needs.
#
#   scripts/setup_env.sh demo|test
#
# Takes the CUDA build of vLLM when an NVIDIA GPU answers, the CPU build otherwise.
# Returns at once when nothing has changed since the last time. Variables:
#   PYTHON       interpreter to build .venv from (default: python3, then python3.11 to 3.13)
#   VLLM_BUILD   cuda or cpu, instead of looking for a GPU
# pip's own settings (index, cache, proxy) are left to the user's pip configuration.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
py=$venv/bin/python
started=$SECONDS

say() { printf '[setup %3ds] %s\n' "$((SECONDS - started))" "$*"; }
die() { printf '[setup] %s\n' "$*" >&2; exit 1; }

goal=${1:-}
case $goal in
    demo) extras=bench ;;
    test) extras=bench,dev ;;
    *) die "usage: scripts/setup_env.sh demo|test" ;;
esac

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU '; }

build=${VLLM_BUILD:-}
if [ -z "$build" ]; then
    if has_gpu; then build=cuda; else build=cpu; fi
fi
case $build in
    cuda) extras=vllm,$extras ;;
    cpu) extras=cpu,$extras ;;
    *) die "VLLM_BUILD=$build: it can be cuda or cpu" ;;
esac

suitable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; }

# What was installed, for whom: any change of it makes the stamp stale.
fingerprint() {
    { cat pyproject.toml scripts/setup_env.sh; pwd; echo "$build $1"; "$py" -V; } |
        sha256sum | cut -d' ' -f1
}
stamp() { echo "$venv/.fxkv-setup-$1"; }
fresh() { [ -x "$py" ] && [ -f "$(stamp "$1")" ] && [ "$(cat "$(stamp "$1")")" = "$(fingerprint "$1")" ]; }

# What `test` installs is all that `demo` needs.
if fresh "$goal" || fresh test; then
    say "$venv is ready (vLLM build: $build)"
    exit 0
fi

# The two builds of vLLM own the same files, and a CPU torch would satisfy the CUDA build.
old_build=$(cat "$venv/.fxkv-build" 2>/dev/null || echo "$build")
clear=
if [ "$old_build" != "$build" ]; then
    say "$venv holds the $old_build build of vLLM: starting it afresh"
    clear=--clear
elif [ -d "$venv" ] && ! suitable "$py"; then
    say "the Python of $venv does not run or is out of range: starting it afresh"
    clear=--clear
fi
if [ -n "$clear" ] || [ ! -d "$venv" ]; then
    python=
    for candidate in "${PYTHON:-python3}" python3.11 python3.12 python3.13; do
        if suitable "$candidate"; then python=$candidate; break; fi
    done
    [ -n "$python" ] || die "no Python 3.11 to 3.13 with its venv module found (on Debian and Ubuntu:" \
        "apt-get install python3 python3-venv); name one with PYTHON=/path/to/python3"
    say "1/4 creating $venv with $("$python" -V)"
    "$python" -m venv $clear "$venv"
else
    say "1/4 using the existing $venv ($("$py" -V))"
fi
rm -f "$(stamp demo)" "$(stamp test)"
echo "$build" >"$venv/.fxkv-build"

say "2/4 installing fx_kvbackend[$extras]; new environments take about 4 GB and a few minutes"
"$py" -m pip install --disable-pip-version-check --no-input --editable ".[$extras]" || {
    [ "$build" = cuda ] || cat >&2 <<'HINT'
[setup] When the line above names torch "+cpu": the CPU build of vLLM needs the CPU build of
[setup] torch, which not every package index has. Add PyTorch's own CPU index (pytorch.org,
[setup] "Get Started") with PIP_EXTRA_INDEX_URL=... and run this again.
HINT
    die "installation failed"
}

# The CPU build of torch may come with a torchvision made for another torch, and transformers
# tries to import whatever torchvision is there. Text models need none of the three.
say "3/4 checking torchvision"
if ! "$py" -c 'import torchvision' 2>/dev/null; then
    if [ -n "$("$py" -m pip list --disable-pip-version-check 2>/dev/null |
        grep -E '^(torchvision|torchaudio|torchcodec) ')" ]; then
        say "    torchvision does not fit this torch: removing it, torchaudio and torchcodec"
        "$py" -m pip uninstall --disable-pip-version-check --yes --quiet \
            torchvision torchaudio torchcodec
    fi
fi

say "4/4 importing vLLM"
"$py" -c 'import vllm; print("    vLLM", vllm.__version__)' 2>"$venv/.fxkv-import.log" || {
    cat "$venv/.fxkv-import.log" >&2
    die "vLLM was installed but cannot be imported"
}

fingerprint "$goal" >"$(stamp "$goal")"
say "$venv is ready (vLLM build: $build)"
