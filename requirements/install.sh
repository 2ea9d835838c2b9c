#!/usr/bin/env bash
# Create or repair .venv from a lock file and install the project into it (editable). Safe to run again at any time:
# an unchanged environment takes a second, an interrupted installation is completed.
#   requirements/install.sh [requirements/cpu.txt]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

lock=${1:-requirements/cpu.txt}
venv=${VENV:-.venv}
torch_index=https://download.pytorch.org/whl/cpu
log=$venv/install.log

say() { printf '[setup] %s\n' "$*"; }
die() { printf '[setup] %s\n' "$*" >&2; exit 1; }
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@" </dev/null; }

fingerprint() {
  { "$venv/bin/python" -c 'import sys; print(sys.version, sys.prefix)'; cat "$lock" pyproject.toml; } | sha256sum | cut -d' ' -f1
}

# Run pip with its output in the log, and say every 20 s how far it is; show the end of the log if it fails.
logged_pip() {
  local label=$1 started=$SECONDS process status=0
  shift
  : >"$log"
  pip "$@" >>"$log" 2>&1 &
  process=$!
  while kill -0 "$process" 2>/dev/null; do
    sleep 1
    if (( (SECONDS - started) % 20 == 19 )); then
      say "  $label: $(grep -c -E '^(Collecting|Requirement already)' "$log" || true) packages looked at, $((SECONDS - started)) s"
      sleep 1
    fi
  done
  wait "$process" || status=$?
  return "$status"
}

python=
for candidate in "${PYTHON:-python3.11}" python3.11 python3; do
  if [ "$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = 3.11 ]; then
    python=$candidate
    break
  fi
done
[ -n "$python" ] || die "no Python 3.11 was found, and the lock is for that version. Install it (apt-get install python3.11 python3.11-venv, or pyenv install 3.11), or name it: make PYTHON=/path/to/python3.11 ..."

if ! "$venv/bin/python" -c 'import pip' >/dev/null 2>&1; then
  say "creating $venv with $("$python" --version)"
  rm -rf "$venv"
  "$python" -m venv "$venv" || die "python -m venv failed; on Debian and Ubuntu: apt-get install python3.11-venv"
fi
if [ "$(cat "$venv/.complete" 2>/dev/null)" = "$(fingerprint)" ]; then
  touch "$venv/.complete"
  exit 0
fi
rm -f "$venv/.complete"

started=$SECONDS
torch=$(grep -m1 '^torch==' "$lock")
count=$(grep -c '==' "$lock")
# The CPU build of torch lies on PyTorch's own index, or where pip's configuration finds it. It has a step of its own, so
# that neither a missing nor an unreachable index gets in the way of the other packages.
say "1/3 $torch"
if ! logged_pip torch install --no-deps "$torch"; then
  logged_pip torch install --no-deps --index-url "$torch_index" "$torch" || {
    tail -n 15 "$log" >&2
    die "$torch was found neither through pip's own configuration nor on $torch_index"
  }
fi
say "2/3 $count packages of $lock (the first time about 4 GB and a few minutes; log: $log)"
logged_pip packages install --no-deps -r "$lock" || { tail -n 15 "$log" >&2; die "pip failed; run the same command again to continue"; }

broken=$("$venv/bin/python" -m infra.lock "$lock" || true)
if [ -n "$broken" ]; then
  say "repairing what an interrupted installation left behind:"
  printf '%s\n' "$broken"
  grep -i -E "^($(cut -d: -f1 <<<"$broken" | sed 's/-/[-_.]/g' | paste -sd'|'))==" "$lock" >"$venv/repair.txt"
  logged_pip repair install --no-deps --force-reinstall -r "$venv/repair.txt" || { tail -n 15 "$log" >&2; die "the repair failed; remove $venv and run again"; }
  "$venv/bin/python" -m infra.lock "$lock" || die "still not as locked; remove $venv and run again"
fi

say "3/3 the project itself"
pip install --quiet --no-deps --no-build-isolation --editable . || die "installing the project failed"
fingerprint >"$venv/.complete"
say "$venv is ready after $((SECONDS - started)) s"
