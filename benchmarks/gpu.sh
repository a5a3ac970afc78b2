#!/usr/bin/env bash
# Tests and measures on one GPU what needs one, in under nine minutes, and prints results as they come:
#   bash benchmarks/gpu.sh
#   ACCELERATOR=cpu SHARE=0.002 bash benchmarks/gpu.sh     # only to check that every part runs; the figures are meaningless
# Each part has a time limit of its own, and a part that fails does not end the others; the exit status is then 1.
# Figures of the notes: PPO on Torch/CartPole-v1 3,936,000 steps/s compiled and 1,562,000 without on one H100, 2,501,000 and 1,170,000 on
# one H200 with another host.
set -uo pipefail
cd "$(dirname "$0")/.."
accelerator=${ACCELERATOR:-gpu}
share=${SHARE:-1}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
status=0
# Prints a number of steps times the share, in whole iterations.
steps() {
  python -c "import sys; steps, rows = map(int, sys.argv[1:]); print(max(1, round(steps * $share / rows)) * rows)" "$@"
}
# Runs a part: its name, its limit in seconds, and its command. Prints what it took.
part() {
  local name=$1 limit=$2 begin=$SECONDS code=0
  shift 2
  echo "== $name: $*"
  timeout "$limit" "$@" 2>&1 | tail -n 12 || code=$?
  echo "== $name ended with status $code after $((SECONDS - begin)) s"
  [ "$code" -eq 0 ] || status=1
}
# Trains, and prints the median of the steps a second in the second half of the rows.
train() {
  local name=$1 limit=$2
  shift 2
  part "$name" "$limit" lightning-rl fit "$@" --trainer.accelerator "$accelerator" --trainer.devices 1 \
    --trainer.default_root_dir "$folder/$name" --evaluation null --seed_everything 1
  python - "$folder/$name" <<'EOF'
import csv, statistics, sys
from pathlib import Path

for file in Path(sys.argv[1]).rglob("metrics.csv"):
    rows = [float(row["time/fps"]) for row in csv.DictReader(file.read_text().splitlines()) if row.get("time/fps")]
    print(f"steps/s, median of the second half of {len(rows)} rows: {statistics.median(rows[len(rows) // 2:]):,.0f}")
EOF
}

python - <<'EOF'
import torch

name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
print(f"torch {torch.__version__}, {name}, {torch.get_num_threads()} threads")
EOF
if [ "$accelerator" = gpu ]; then
  part "tests" 150 pytest -m gpu -p no:benchmark -n 4 -q --no-header tests/test_accelerators.py
fi
cartpole=(--model PPO --model.env.id Torch/CartPole-v1 --model.env.num_envs 4096 --model.n_steps 32 --model.batch_size 32768
  --model.log_interval 131072 --model.max_env_steps "$(steps 10485760 131072)")
train "PPO Torch CartPole compiled" 90 "${cartpole[@]}" --model.compile true
train "PPO Torch CartPole" 60 "${cartpole[@]}" --model.compile false
train "SAC HalfCheetah" 100 --config sac/halfcheetah --model.compile true --model.learning_starts 1000 --model.log_interval 1000 \
  --model.max_env_steps "$(steps 8000 1000)"
train "PPO Pong" 100 --config ppo/pong --model.log_interval 8192 --model.max_env_steps "$(steps 131072 1024)"
exit "$status"
