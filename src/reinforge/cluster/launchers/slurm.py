"""A Slurm batch script.

Ranks are started by srun itself or by torchrun on each node, or Ray is started on all nodes, head
on the first.

A signal before the end of the time (USR1, to the script only) makes rank 0 save a checkpoint and
end; the script then puts its own job back into the queue, and the same command continues there.
`scancel` and failures do not requeue; a lost node does (`--requeue`).
"""

from __future__ import annotations

import shlex
from typing import Any, Literal

from reinforge.cluster.launchers.job import LaunchJob, bash_array, exports, mebibytes

Starter = Literal["srun", "torchrun", "ray"]
NOTICE_SECONDS = 120  # between the signal and the end of the time; Slurm may be a minute early
RAY_SECONDS = 180  # for all nodes to join

SETUP = """\
set -u
mkdir -p "$run_dir/logs"
cd {chdir} || exit 2
logs="$run_dir/logs"
pattern=${{logs//%/%%}}  # srun reads % in the names of its files
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
getent hosts "$first" >/dev/null || first=$(hostname)  # this script runs on the first node
port=$((20000 + SLURM_JOB_ID % 20000))
# of one task; srun does not take it from the job by itself, and would bind every task to one core
cores=${{SLURM_CPUS_PER_TASK:-$((${{SLURM_CPUS_ON_NODE:-1}} / {tasks}))}}
if [ "$cores" -lt 1 ]; then cores=1; fi
export SRUN_CPUS_PER_TASK="$cores"
export PYTHONUNBUFFERED=1
restarts=${{SLURM_RESTART_COUNT:-0}}
echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, started $restarts times before, logs in $logs"
"""

WAITING = """\
stopped=0
trap 'stopped=1; echo "USR1: asking the run to save and end"; "${stop[@]}"' USR1
while :; do
  wait "$child"; code=$?
  if [ "$code" -le 128 ]; then break; fi
  # if the child is alive, a signal ended the wait, not the run
  kill -0 "$child" 2>/dev/null || { wait "$child"; code=$?; break; }
done
"""

REQUEUE = """\
if [ "$stopped" = 1 ] && [ "$code" -ne 0 ]; then
  echo "exit code $code after the signal: back into the queue"
  exec scontrol requeue "$SLURM_JOB_ID"
fi
echo "ended with exit code $code"
exit "$code"
"""

BY_SRUN = """\
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$cores}"
export MASTER_ADDR="$first" MASTER_PORT="$port"
as_rank='export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID" WORLD_SIZE="$SLURM_NTASKS"
exec "$@"'
srun --kill-on-bad-exit=0 --wait=60 --output="$pattern/rank-%t-%N.log" --open-mode=append \\
  bash -c "$as_rank" rank "${command[@]}" &
child=$!
stop=(scancel --signal=TERM "$SLURM_JOB_ID.0")  # srun itself would end the step at once
"""

BY_TORCHRUN = """\
as_agent='exec "$0" -m torch.distributed.run \\
  --nnodes "$SLURM_NNODES" --nproc-per-node {ranks} --node-rank "$SLURM_NODEID" \\
  --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" "$@"'
threads=$((cores / {ranks}))
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}}"
export MASTER_ADDR="$first" MASTER_PORT="$port"
srun --kill-on-bad-exit=0 --wait=60 --output="$pattern/node-%n-%N.log" --open-mode=append \\
  bash -c "$as_agent" "${{command[@]}}" &
child=$!
stop=(scancel --signal=TERM "$SLURM_JOB_ID.0")
"""

BY_RAY = """\
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$run_dir/launch/ray-token"
export RAY_ADDRESS="$first:$port"
(
  umask 077
  mkdir -p "$run_dir/launch"
  [ -s "$RAY_AUTH_TOKEN_PATH" ] ||
    od -An -N32 -tx1 /dev/urandom | tr -d ' \\n' >"$RAY_AUTH_TOKEN_PATH"
)
node=(srun --overlap --ntasks-per-node=1 --open-mode=append)
"${{node[@]}}" --nodes=1 --ntasks=1 --relative=0 --output="$pattern/ray-head-%N.log" \\
  "${{ray[@]}}" start --head --block --port="$port" --num-cpus="$cores" --num-gpus={gpus} \\
  --dashboard-host=127.0.0.1 --disable-usage-stats &
started=($!)
until (exec 3<>"/dev/tcp/$first/$port") 2>/dev/null; do
  kill -0 "${{started[0]}}" || exit 1
  sleep 1
done
if [ "$SLURM_NNODES" -gt 1 ]; then
  "${{node[@]}}" --nodes=$((SLURM_NNODES - 1)) --ntasks=$((SLURM_NNODES - 1)) --relative=1 \\
    --output="$pattern/ray-worker-%n-%N.log" \\
    "${{ray[@]}}" start --address="$RAY_ADDRESS" --block --num-cpus="$cores" --num-gpus={gpus} \\
    --disable-usage-stats &
  started+=($!)
fi
"${{command[0]}}" -m reinforge.cluster.launchers.joined "$SLURM_NNODES" {seconds} || exit 1
"${{command[@]}}" >>"$logs/driver.log" 2>&1 &
child=$!
stop=(kill -TERM "$child")
"""


def script(job: LaunchJob, starter: Starter = "srun") -> str:
    """The batch script.

    Everything that a user wrote is quoted; lines for sbatch hold only words that need no quotes.
    """
    tasks = max(1, job.gpus) if starter == "srun" else 1
    wanted = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": tasks,
        "gpus-per-node": job.gpus or None,
        **_share(job, tasks),
        "time": job.time,
        "partition": job.partition,
        "account": job.account,
        "signal": f"B:USR1@{NOTICE_SECONDS}",
        "open-mode": "append",
    }
    lines = [
        f"#SBATCH --{key}" if value is True else f"#SBATCH --{key}={value}"
        for key, value in wanted.items()
        if value is not None
    ]
    words = job.command()
    body = [
        f"run_dir={shlex.quote(str(job.run_dir))}",
        SETUP.format(chdir=shlex.quote(str(job.chdir)), tasks=tasks),
        *exports(job.env),
    ]
    if starter == "torchrun":  # the agent starts `-m reinforge ...` itself
        start = BY_TORCHRUN.format(ranks=max(1, job.gpus))
    elif starter == "ray":
        body.append(bash_array("ray", [job.python, "-m", "ray.scripts.scripts"]))
        start = BY_RAY.format(gpus=job.gpus, seconds=RAY_SECONDS)
    else:
        start = BY_SRUN
    after = (
        'kill -TERM "${started[@]}" 2>/dev/null; wait "${started[@]}"\n' if starter == "ray" else ""
    )
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            "#SBATCH --requeue",
            *body,
            bash_array("command", words),
            start,
            WAITING + after,
            REQUEUE,
        ]
    )


def _share(job: LaunchJob, tasks: int) -> dict[str, Any]:
    """How much of a machine: all of it, or cores and memory by the GPUs. Without a word a task has
    one core.
    """
    memory = None if job.memory is None else f"{mebibytes(job.memory)}M"
    if job.whole_machines:
        cpus = None if job.cpus is None else max(1, job.cpus // tasks)
        return {"exclusive": True, "cpus-per-task": cpus, "mem": memory or "0"}  # 0: all of it
    return {"cpus-per-task": max(1, job.cpus_of(job.gpus) // tasks), "mem": memory}


def submission(job: LaunchJob, path: str) -> list[str]:
    """The sbatch command.

    Paths are here and not in the script: a word of a command line needs no quotes.
    """
    log = str(job.run_dir / "logs").replace("%", "%%")
    return ["sbatch", "--parsable", f"--output={log}/slurm-%j.log", path]
