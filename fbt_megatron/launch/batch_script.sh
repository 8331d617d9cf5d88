# From here on every launch has the same text: fbt_megatron/launch/batch_script.sh.

say() { echo "== $(date '+%F %T') | job $job | $*"; }

newest_checkpoint() { cat "$run_dir/checkpoints/latest" 2>/dev/null; }

# Left over from an allocation or a launcher around the sbatch command: srun refuses values that disagree with its
# options, and processes would take the variables of another run for their own.
unset SLURM_CPUS_PER_TASK SRUN_CPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE \
    SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_MEM_PER_NODE SLURM_GPUS SLURM_GPUS_PER_NODE SLURM_GPUS_PER_TASK \
    SLURM_CPU_BIND SLURM_CPU_BIND_LIST SLURM_CPU_BIND_TYPE SLURM_CPU_BIND_VERBOSE SLURM_DISTRIBUTION SLURM_EXPORT_ENV \
    RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT

load_modules() {
    [ "$#" -gt 0 ] || return 0
    local file
    for file in /etc/profile.d/modules.sh /etc/profile.d/lmod.sh /etc/profile.d/z00_lmod.sh; do
        # shellcheck disable=SC1090
        type module >/dev/null 2>&1 || { [ -r "$file" ] && . "$file"; }
    done
    if ! type module >/dev/null 2>&1 || ! module load "$@"; then
        say "the modules cannot be loaded: $*. Correct environment.modules."
        exit 2
    fi
}

# The processes meet on the first node, where this script runs. The port lies outside the range from which hosts serve
# their own connections, and is held by a lock until the job ends, for jobs of other people that start meanwhile.
choose_meeting_point() {
    local low=32768 high=60999 below above tries index port lock
    MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    MASTER_ADDR=${MASTER_ADDR:-$(hostname)}
    read -r low high 2>/dev/null </proc/sys/net/ipv4/ip_local_port_range
    below=$((low > 10000 ? low - 10000 : 0)) # 10000 to low - 1
    above=$((high > 9999 ? 65535 - high : 55536)) # high + 1 to 65535
    for ((tries = 0; tries < below + above; tries++)); do
        index=$(((SLURM_JOB_ID + tries) % (below + above)))
        port=$((index < below ? 10000 + index : 65536 - above + index - below))
        port_is_free "$port" || continue
        { exec {lock}>"/tmp/fbt_port_$port.lock"; } 2>/dev/null || continue
        if flock --nonblock "$lock"; then
            MASTER_PORT=$port
            export MASTER_ADDR MASTER_PORT
            return
        fi
        exec {lock}>&-
    done
    say "no port is free on $(hostname). Set MASTER_PORT in environment.variables."
    exit 2
}

port_is_free() {
    ! awk '{print $2}' /proc/net/tcp /proc/net/tcp6 2>/dev/null | grep -q "$(printf ':%04X$' "$1")"
}

# SLURM says that the time limit is near: training is told once, saves a checkpoint after its step and leaves with 138.
signalled=0 interrupted=0 told=0 step=
trap 'signalled=1 interrupted=1; tell_step' USR1
tell_step() {
    [ -n "$step" ] && [ "$told" = 0 ] || return 0
    told=1
    say "the time limit is near: asking for a checkpoint"
    kill -USR1 "$step"
}

# $1: why. A start that saves no checkpoint counts, as does one that crashed, even after a new checkpoint, which starts
# the count again. Too many end the job.
requeue() {
    local state owner= count=0 crashed=0
    case $status in 138 | 143) ;; *) crashed=1 ;; esac
    state=$(squeue --noheader --jobs="$job" --format=%T)
    case $state in
        RUNNING | SIGNALING | SUSPENDED | RESIZING) ;; # SIGNALING: the signal has only just come
        *)
            say "$1; not requeued, because the job is ${state:-gone}"
            exit "$status"
            ;;
    esac
    [ ! -r "$run_dir/slurm_restarts" ] || read -r owner count <"$run_dir/slurm_restarts"
    if [ "$owner" != "$job" ] || [ "$(newest_checkpoint)" != "$checkpoint_at_start" ]; then count=0; fi
    if [ "$crashed" = 1 ] || [ "$(newest_checkpoint)" = "$checkpoint_at_start" ]; then count=$((count + 1)); fi
    mkdir -p "$run_dir" && echo "$job $count" >"$run_dir/slurm_restarts"
    if [ "$count" -gt "$max_crashes" ]; then
        say "$1; not requeued: more than restarts.max_crashes=$max_crashes starts crashed or saved nothing" \
            "since the last checkpoint"
        exit "$status"
    fi
    say "$1; requeued ($count of $max_crashes starts that crashed or saved nothing since the last checkpoint)"
    scontrol requeue "$job" || say "scontrol requeue failed; submit the job again to go on"
    exit "$status"
}

say "start $((${SLURM_RESTART_COUNT:-0} + 1)) on $SLURM_JOB_NODELIST"
load_modules "${modules[@]}"
set_up
choose_meeting_point
set_variables
say "processes meet at $MASTER_ADDR:$MASTER_PORT, run directory $run_dir"

checkpoint_at_start=$(newest_checkpoint)
if [ "$signalled" = 1 ]; then
    status=138
    requeue "the time limit came before training started"
fi
srun "${srun_options[@]}" "${command[@]}" &
step=$!
[ "$signalled" = 0 ] || tell_step
# `wait` returns early when the signal comes; its status is then not that of the step.
while :; do
    interrupted=0
    wait "$step"
    status=$?
    [ "$interrupted" = 1 ] || break
done

case $status in
    0) say "training has ended" ;;
    2 | 3 | 4 | 5) say "exit status $status: another start would end in the same way, so the job is not requeued" ;;
    130 | 143)
        # SLURM sends SIGTERM to a job that it preempts, too, and requeues only what still runs when the grace is over.
        if scontrol --oneliner show job "$job" | grep -q ' PreemptTime=[0-9]'; then
            requeue "preempted"
        fi
        say "exit status $status: stopped on request, so the job is not requeued"
        ;;
    138) requeue "stopped before the time limit" ;;
    *) requeue "exit status $status: crashed" ;;
esac
exit "$status"
