# shellcheck shell=bash
# What the scripts of this folder share: the whole life of a job around its one `srun`. README.md tells how to use it.
set -euo pipefail

say() { printf 'muster: %s\n' "$*"; }

# muster [--ranks N] COMMAND…: the agents of all hosts, and by them the ranks. Does not return.
# muster preflight [OPTION…]: only looks at the hosts; with MUSTER_PREFLIGHT=1 any job does so first.
muster() {
    local words=() code=0 again began
    began=$(date +%s)

    # Signals come to this shell alone (--signal=B: and scancel --batch), and only `wait` lets it hear them.
    asked='' step=''
    trap 'asked=TERM; muster_ask' TERM
    trap 'asked=${asked:-USR2}; muster_ask' USR2
    trap 'asked=${asked:-USR1}; muster_ask' USR1
    muster_settings
    say "job $muster_job ($SLURM_JOB_NAME) on $SLURM_JOB_NODELIST, restart ${SLURM_RESTART_COUNT:-0}" \
        "· log ${muster_log:-?} · run folder $MUSTER_RUNS_DIR/$MUSTER_RUN_ID · code $MUSTER_HOME" \
        "· save and stop: scancel --batch --signal=USR1 $muster_job"

    [[ $MUSTER_MAX_RESTARTS =~ ^[0-9]{1,9}$ ]] || {
        say "MUSTER_MAX_RESTARTS='$MUSTER_MAX_RESTARTS' must be a whole number: nothing was started" >&2
        exit 2
    }

    private=$(mktemp --directory)
    trap 'rm -rf "$private"' EXIT
    mkdir -p "$MUSTER_RUNS_DIR" || { say "cannot make $MUSTER_RUNS_DIR: set MUSTER_RUNS_DIR" >&2; exit 3; }
    if [ "${1-}" = preflight ]; then
        shift
        muster_preflight "$@"
        exit 0
    fi
    [ "${MUSTER_PREFLIGHT:-0}" = 0 ] || muster_preflight
    MUSTER_SCRIPT=$0 muster_python slurm "$@" >"$private/words" || exit
    mapfile -d '' -t words <"$private/words"

    # What the agents prove by that they belong together: on standard input, as it is neither in argv nor in a variable.
    # This shell holds the other end, 9, for as long as the job is to go on.
    mkfifo -m 600 "$private/stdin"
    exec 7<>"$private/stdin" # so that opening either end alone does not wait for the other
    exec 8<"$private/stdin"
    exec 9>"$private/stdin" 7>&-
    head -c 32 /dev/urandom | base64 >&9

    # Settings of the batch script that would cut the step's one task a host down to a part of it (one GPU, one core).
    unset SLURM_GPUS_PER_TASK SLURM_GPU_BIND SLURM_NTASKS_PER_GPU SLURM_CPUS_PER_GPU SLURM_CPU_BIND SLURM_MEM_PER_GPU \
        SLURM_TRES_PER_TASK SLURM_TRES_BIND SLURM_NTASKS_PER_NODE SLURM_NTASKS SLURM_NPROCS SLURM_DISTRIBUTION
    "${words[@]}" <&8 8<&- 9>&- &
    step=$!
    exec 8<&-
    [ -z "$asked" ] || muster_ask
    while
        code=0
        wait "$step" || code=$?
        kill -0 "$step" 2>/dev/null
    do :; done
    # A signal ends `wait` with a code of its own; where srun ended just then, bash still has its.
    if [ "$code" -gt 128 ]; then
        wait "$step" || again=$?
        [ "${again:-0}" = 127 ] || code=${again:-0}
    fi
    muster_end "$code" "$began"
}

# What Slurm gives each host, and then what the job would find there, on each host and between them. Ends the script
# where a host is not fit.
muster_preflight() {
    local words=()
    muster_python slurm_check || exit
    muster_python slurm preflight "$@" >"$private/words" || exit
    mapfile -d '' -t words <"$private/words"
    # All hosts get the same: it proves that they belong together.
    head -c 32 /dev/urandom | base64 | timeout --kill-after=10 300 "${words[@]}" >"$private/reports" || true
    muster_python preflight.command --judge "$private/reports" "$@" || exit
}

# What is not said gets its usual value; a site's own values come from a file.
muster_settings() {
    MUSTER_HOME=$(dirname "${here:?}")
    muster_shown
    muster_job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
    muster_job=${muster_job:-$SLURM_JOB_ID}
    # An array's number may be that of one of its tasks, too: Slurm shows all of them then.
    muster_log=$(awk -v RS= -v id="JobId=$SLURM_JOB_ID" '$1 == id' <<<"$job" | sed -n 's/^ *StdOut=//p')
    local site
    for site in "${MUSTER_SITE:-}" "$here/site.sh" /etc/muster/slurm.sh; do
        if [ -r "$site" ]; then
            set -a
            # shellcheck source=/dev/null
            source "$site"
            set +a
            break
        fi
    done
    : "${MUSTER_RUNS_DIR:=$SLURM_SUBMIT_DIR/runs}" "${MUSTER_RUN_ID:=slurm-$muster_job}" "${MUSTER_MAX_RESTARTS:=100}"
    [[ $MUSTER_RUNS_DIR = /* ]] || MUSTER_RUNS_DIR=$PWD/$MUSTER_RUNS_DIR # for a container's client it would be a volume
    export MUSTER_HOME MUSTER_RUNS_DIR MUSTER_RUN_ID MUSTER_MAX_RESTARTS
}

# What the script asked for already, unless Slurm's controller was silent: it may be starting again just now.
muster_shown() {
    local try=0
    until [ -n "${job:=}" ]; do
        [ $((try += 1)) -le 4 ] || {
            say "scontrol show job $SLURM_JOB_ID told $(hostname) nothing: is slurmctld up?" \
                "Nothing was started" >&2
            exit 3
        }
        sleep 5
        job=$(timeout 20 scontrol show job "$SLURM_JOB_ID") || true
    done
}

muster_python() {
    local module=$1
    shift
    PYTHONPATH=$MUSTER_HOME "${MUSTER_PYTHON:-python3}" -m "train.launch.$module" "$@"
}

# A stop request: the agents' standard input ends. Not a signal: without control groups Slurm sends one to the ranks, too,
# which it kills while they load torch; and srun, when it gets SIGTERM, kills the step.
muster_ask() {
    [ -n "$step" ] || return 0
    say "$asked came: saves and stops"
    exec 9>&-
}

# Back into the queue, or the job's exit code.
muster_end() {
    local what code without on
    what=$(muster_python slurm_after "$1" "$asked" "$2") || { say "exit code $1: not started again" >&2; exit "$1"; }
    read -r what code without on <<<"$what"
    [ "$what" = requeue ] || exit "$code"
    trap '' TERM # Slurm ends this script and what it has started now, but there is a word to say yet
    muster_tell requeue "$muster_job" || {
        say "Slurm did not take it back into the queue (scontrol requeue $muster_job): exit code $code." \
            "To go on, submit it again with MUSTER_RUN_ID=$MUSTER_RUN_ID" >&2
        exit "$code"
    }
    [ "$without" = - ] || muster_tell update "JobId=$muster_job" "ExcNodeList=$without" ||
        say "Slurm did not take that in: it may start on that host again" >&2
    [ "$on" = - ] || muster_tell update "JobId=$muster_job" "ReqNodeList=$on" ||
        say "Slurm did not take that in: it may start on other hosts, and anew" >&2
    exit 0
}

# scontrol, once more where it fails: the controller may be starting again just now. Without `timeout`, which would let the
# signal in that Slurm sends as soon as it has taken the job back.
muster_tell() {
    local try
    for try in 1 2 3; do
        [ "$try" = 1 ] || sleep 5
        scontrol "$@" && return 0
        # It may have been heard, and only its answer have been lost.
        [[ $1 != requeue || $(scontrol show job "$muster_job") != *JobState=PENDING* ]] || return 0
    done
    return 1
}
