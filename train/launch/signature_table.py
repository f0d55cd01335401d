"""The known failures, from special to general: of two that fit a line, the first one counts.

Texts are those of PyTorch 1.8 to 2.13, NCCL 2.4 to 2.29, Gloo, Slurm 20 to 25, Docker 20 to 28, the NVIDIA driver,
glibc and Python; tests/unit/test_signatures.py has a real line for each.
"""

from __future__ import annotations

from train.launch.signatures import Signature

S = Signature

_SMALLER = (
    "make batch.micro_size smaller (accumulation keeps the global batch), use --config amp, or a smaller model; "
    "`nvidia-smi` tells whether another process holds memory on that GPU"
)
_SHM = (
    "give the container a larger /dev/shm: `docker run --shm-size=16g` or --ipc=host, `shm_size:` in Compose; "
    "or use fewer data workers"
)
_MEMORY = (
    "use fewer data workers or a smaller batch.micro_size, or ask for more memory (Slurm: --mem, Docker: --memory)"
)
_GPU_BROKEN = (
    "take the host out of the job (Slurm: --exclude) and have the GPU reset or replaced: `nvidia-smi -q -d ECC`"
)
_OTHER_LOG = "look into the logs of the other ranks for the one that ended first; `python -m train explain LOG…` does"
_LATE = (
    "find the rank that did not come (its log ends early or elsewhere); if it only was slow, give a longer time-out "
    "(--runtime.step_timeout_s)"
)
_SAME_PATH = "make every rank run the same collectives on the same shapes: no branch on the rank, no uneven last batch"
_NET = (
    "check the address, and that the hosts reach each other on that port: `nc -vz HOST PORT` from each, firewalls open"
)

TABLE = (
    # Ports and addresses
    S("port-in-use", "environment", ("ddress already in use", "EADDRINUSE", "port is already allocated"),
      "port {port} was already in use",
      "another job, or what is left of one, holds it: `ss -ltnp 'sport = :{port}'` names the process; end that, or "
      "give another --master-port",
      r"(?:port: |\]:|\d\.\d+:)(?P<port>\d{2,5})\b.*(?:ddress already in use|EADDRINUSE|is already allocated)"),
    S("address-in-use", "environment", ("ddress already in use", "EADDRINUSE"),
      "a port that it needs was already in use",
      "another job, or what is left of one, holds it: `ss -ltnp` names the process; end that, or give another "
      "--master-port"),
    S("no-interface", "environment", ("Unable to find address for", "Unable to find interface for"),
      "Gloo finds no usable address for {name}",
      "set GLOO_SOCKET_IFNAME to an interface that leads to the other hosts (`ip route get MASTER_ADDR`), or unset it",
      r"Unable to find (?:address|interface) for: \[?(?P<name>[^\s\]]+)"),
    S("nccl-no-interface", "environment", ("no socket interface found",),
      "NCCL finds no network interface that it may use",
      "set NCCL_SOCKET_IFNAME to an interface that leads to the other hosts (`ip route get MASTER_ADDR`), or unset it",
      r"(?:Bootstrap|NET/Socket) ?: no socket interface found"),
    S("ssh-host-key", "environment", ("Host key verification failed", "REMOTE HOST IDENTIFICATION HAS CHANGED"),
      "SSH does not trust the host's key",
      "compare the key with the host's own (`ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` there), then "
      "`ssh-keygen -R HOST` and `ssh-keyscan HOST >> ~/.ssh/known_hosts`"),
    S("ssh-denied", "environment", ("Permission denied (",),
      "SSH was refused: no key or password that the host accepts",
      "put your public key there (`ssh-copy-id USER@HOST`), and check the user's name",
      r"Permission denied \((?:[a-z-]+,)*(?:publickey|password|keyboard-interactive)"),
    S("ssh-connect", "environment", ("connect to host",),
      "SSH cannot reach {host}: {why}",
      "check that the host is up, its name and address are right, and sshd listens on port {port}",
      r"ssh: connect to host (?P<host>\S+) port (?P<port>\d+): (?P<why>.+?)\s*$"),
    S("c10d-name", "environment", ("network addresses of",),
      "the name {name} cannot be resolved",
      "use the host's address, or put the name into DNS or /etc/hosts of every host (a warning of IPv6 alone is "
      "harmless)",
      r"The IPv[46] network addresses of \((?P<name>[^,]+), \d+\) cannot be retrieved", is_weak=True),
    S("name", "environment",
      ("Name or service not known", "Temporary failure in name resolution", "No address associated with hostname"),
      "a host's name cannot be resolved",
      "use the host's address, or put the name into DNS or /etc/hosts of every host; `getent hosts NAME` must answer"),
    S("no-route", "environment", ("No route to host", "etwork is unreachable"),
      "there is no way through the network to another host", _NET),

    # Memory, disk, files
    S("shm", "environment",
      ("insufficient shared memory", "out of shared memory", "unable to write to file </torch_", "/dev/shm"),  # noqa: S108
      "shared memory (/dev/shm) ran out", _SHM,
      r"insufficient shared memory \(shm\)|workers are out of shared memory|unable to write to file </torch_"
      r"|creating shared memory segment|/dev/shm\S* .*No space left|No space left.*/dev/shm"),
    S("bus-error", "environment", ("us error",),
      "a bus error: memory mapped from a file could not be had, most often because /dev/shm is full", _SHM,
      r"killed by signal: Bus error|Fatal Python error: Bus error|task \d+: Bus error|^Bus error|: +\d+ Bus error"),
    S("disk-full", "environment", ("No space left on device", "Disk quota exceeded"),
      "a disk is full, or its quota used up",
      "`df -h` and `df -i` on that host (`quota -s` where there are quotas): remove old checkpoints, or give another "
      "--runs-dir"),
    S("memlock", "environment", ("ibv_reg_mr", "ibv_create_cq", "ibv_create_qp"),
      "InfiniBand may lock no more memory",
      "raise memlock: `ulimit -l unlimited` in the job, `LimitMEMLOCK=infinity` for slurmd, `ulimits: memlock: -1` "
      "for a container",
      r"ibv_\w+ failed with error Cannot allocate memory"),
    S("slurm-oom", "environment", ("oom_kill event", "oom-kill event", ": Out Of Memory"),
      "a process was killed because the job's memory limit was reached, Slurm says", _MEMORY,
      r"Detected \d+ oom[_-]kill event|srun: error: \S+ tasks? [\d,-]+: Out Of Memory"),
    S("kernel-oom", "environment", ("Killed process", "oom-kill:constraint="),
      "the kernel killed a process for want of memory", _MEMORY,
      r"[Oo]ut of memory: Kill(?:ed)? process \d+|oom-kill:constraint="),
    S("worker-killed", "environment", ("is killed by signal: Killed",),
      "a data worker was killed, most often for want of memory", _MEMORY, r"DataLoader worker .* is killed by signal"),
    S("torchrun-killed", "environment", ("exitcode: -9",),
      "local rank {rank} was killed by SIGKILL, most often for want of memory",
      "`dmesg | grep -i oom` on that host tells; if so, " + _MEMORY,
      r"failed \(exitcode: -9\) local_rank: (?P<rank>\d+)", is_weak=True),
    S("open-files", "environment", ("Too many open files", "received 0 items of ancdata"),
      "it has too many files open",
      "`ulimit -n 65536` before the start (`LimitNOFILE=` for a service), or use fewer data workers"),
    S("host-memory", "environment", ("annot allocate memory", "t allocate memory: you tried to allocate"),
      "the host had no memory left to give", _MEMORY),
    S("memory-error", "exception", ("MemoryError",), "Python found no memory", _MEMORY, r"(?:^|\s)MemoryError(?:$|: )"),

    # GPUs
    S("cuda-oom", "exception", ("CUDA out of memory",),
      "GPU {gpu} was full: {want} wanted, {free} of {total} free", _SMALLER,
      r"Tried to allocate (?P<want>[\d.]+ \w+)\. GPU (?P<gpu>\d+) has a total capac\w+ of (?P<total>[\d.]+ \w+) "
      r"of which (?P<free>[\d.]+ \w+) is free"),
    S("cuda-oom-old", "exception", ("CUDA out of memory",),
      "GPU {gpu} was full: {want} wanted, {free} of {total} free", _SMALLER,
      r"Tried to allocate (?P<want>[\d.]+ \w+) \(GPU (?P<gpu>\d+); (?P<total>[\d.]+ \w+) total capacity; .*?"
      r"(?P<free>[\d.]+ \w+) free;"),
    S("cuda-oom-plain", "exception",
      ("CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "OutOfMemoryError",
       "'out of memory'"),
      "a GPU was full", _SMALLER,
      r"CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|torch\.(?:cuda\.)?OutOfMemoryError"
      r"|Cuda failure (?:\d+ )?'out of memory'"),
    S("ordinal", "environment", ("invalid device ordinal",),
      "it asked for a GPU that it cannot see",
      "start no more ranks a host than it has GPUs (`nvidia-smi -L`), and check CUDA_VISIBLE_DEVICES; under Slurm use "
      "--gpus-per-node, not --gpus-per-task"),
    S("duplicate-gpu", "exception", ("Duplicate GPU detected",),
      "ranks {a} and {b} use the same GPU",
      "take the GPU by local rank: torch.cuda.set_device(int(os.environ['LOCAL_RANK'])), and give each host as many "
      "ranks as GPUs",
      r"Duplicate GPU detected ?: rank (?P<a>\d+) and rank (?P<b>\d+) both on CUDA device"),
    S("xid", "environment", ("NVRM: Xid",),
      "the driver reported error Xid {number} of the GPU at {pci}",
      "NVIDIA's list of Xid errors tells what {number} is; 48, 63, 64, 74, 79, 94 and 95 are hardware: " + _GPU_BROKEN,
      r"NVRM: Xid \(PCI:(?P<pci>[0-9a-fA-F:.]+)\): (?P<number>\d+)"),
    S("gpu-broken", "environment",
      ("uncorrectable ECC error", "uncorrectable NVLink error", "GPU is lost", "fallen off the bus"),
      "a GPU is broken or gone", _GPU_BROKEN),
    S("illegal-access", "exception", ("an illegal memory access was encountered",),
      "a CUDA kernel used memory that is not its own",
      "run once with CUDA_LAUNCH_BLOCKING=1 to see which operation it is; indices out of range are the usual reason"),
    S("device-assert", "exception", ("device-side assert triggered",),
      "a CUDA kernel found a value out of range, such as a label that is no class",
      "run the same batch on the CPU, or once with CUDA_LAUNCH_BLOCKING=1, to see which"),
    S("launch-failure", "exception", ("unspecified launch failure",),
      "a CUDA kernel crashed",
      "run once with CUDA_LAUNCH_BLOCKING=1 to see which; `dmesg | grep Xid` tells of hardware"),
    S("old-driver", "environment",
      ("CUDA driver version is insufficient", "NVIDIA driver on your system is too old"),
      "the NVIDIA driver is older than this PyTorch needs",
      "update the host's driver, or install a PyTorch for an older CUDA (`nvidia-smi` shows the newest that works)"),
    S("driver-mismatch", "environment", ("river/library version mismatch",),
      "the NVIDIA driver was updated and its old kernel module is still loaded", "reboot that host"),
    S("fabric-manager", "environment", ("system not yet initialized",),
      "the GPUs' switches are not ready", "start NVIDIA's fabric manager: `systemctl restart nvidia-fabricmanager`",
      r"(?i:Error 802|CUDA error|cudaErrorSystemNotReady).*system not yet initialized"),
    S("no-gpu", "environment",
      ("Found no NVIDIA driver", "No CUDA GPUs are available", "Torch not compiled with CUDA enabled"),
      "it found no GPU that it could use",
      "`nvidia-smi` must work where the ranks run (containers: --gpus all), with a PyTorch built for CUDA; or train "
      "with --runtime.device cpu"),
    S("kernel-image", "environment", ("no kernel image is available",),
      "this PyTorch was not built for this GPU",
      "install a PyTorch whose torch.cuda.get_arch_list() has the GPU's compute capability"),

    # Containers and libraries
    S("docker-permission", "environment", ("permission denied while trying to connect to",),
      "the user may not use Docker",
      "`sudo usermod -aG docker $USER`, then log in again (`newgrp docker` for this shell)",
      r"permission denied while trying to connect to the (?i:docker)"),
    S("docker-daemon", "environment", ("Cannot connect to the Docker daemon",),
      "Docker is not running there", "`systemctl start docker` on that host, or set DOCKER_HOST"),
    S("nvidia-cli", "environment", ("nvidia-container-cli",),
      "the container got no GPU: {why}",
      "`nvidia-smi` must work on the host itself; then install NVIDIA's container toolkit anew, or reboot after a "
      "driver update",
      r"nvidia-container-cli: (?P<why>[^\n]{1,200}?)(?:: unknown\.?)?\s*$"),
    S("no-toolkit", "environment", ("could not select device driver",),
      "Docker knows no GPUs",
      "install NVIDIA's container toolkit, then `nvidia-ctk runtime configure --runtime=docker` and restart Docker "
      "while no job runs",
      r'could not select device driver "[^"]*"'),
    S("no-image", "environment",
      ("manifest unknown", "pull access denied", "No such image", "failed to import docker image"),
      "the container image is not there",
      "check its name and tag, log in to the registry (`docker login`), or build and load it on every host",
      r"manifest unknown|pull access denied for |No such image: |pyxis: failed to import docker image"),
    S("glibc", "environment", ("' not found (required by",),
      "{lib} of that host is too old: {version} is missing",
      "run it in the image, or on a host with a newer system; a library built elsewhere must be built there",
      r"(?P<lib>lib[^/\s]+?)(?:\.so\S*)?: version `(?P<version>[A-Z]+_[\w.]+)' not found"),
    S("library", "environment", ("cannot open shared object file",),
      "the library {lib} is missing",
      "install it on that host (or in the image), or add its folder to LD_LIBRARY_PATH",
      r"(?P<lib>[\w.+-]+\.so[\w.]*): cannot open shared object file"),

    # Slurm
    S("munge", "environment", ("credential",),
      "Slurm's hosts do not trust each other's messages: {what}",
      "make clocks agree (`chronyc tracking`) and /etc/munge/munge.key equal on all hosts, then "
      "`systemctl restart munge`; test with `munge -n | ssh HOST unmunge`",
      r"(?:[Mm]unge\b.*|authentication error|failed on node \S+): "
      r"(?P<what>(?:[Ii]nvalid|[Rr]ewound|[Ee]xpired)(?: job)? credential)"),
    S("munge-down", "environment", ("munge.socket",),
      "munge is not running there", "`systemctl restart munge` on that host, then `munge -n | unmunge`",
      r"(?:Unable|Failed) to access \"\S*munge\.socket"),
    S("time-limit", "environment", ("DUE TO TIME LIMIT",),
      "the job's time limit was reached",
      "ask for more (`sbatch --time=…`), or requeue: the same command goes on from the last checkpoint"),
    S("preempted", "environment", ("DUE TO PREEMPTION", "DUE TO NODE FAILURE"),
      "Slurm took the job off its nodes: {why}",
      "requeue it (`scontrol requeue JOB`, or sbatch --requeue): the same command goes on from the last checkpoint",
      r"CANCELLED AT \S+ DUE TO (?P<why>PREEMPTION|NODE FAILURE)"),
    S("kill-task", "environment", ("Kill task failed",),
      "Slurm could not end a job's processes and took the node out of service",
      "end what is left there (`ps aux`: state D waits for a disk or network file system), then "
      "`scontrol update NodeName=NODE State=RESUME`",
      r"(?:[Rr]eason[= ]|reason set to: |^\s*)Kill task failed(?!:)"),

    # The program
    S("mark-twice", "exception", ("mark a variable ready only once", "marked as ready twice"),
      "a parameter's gradient became ready twice in one backward pass",
      "checkpoint activations with use_reentrant=False, use no parameter outside forward(), one DDP wrapper a model"),
    S("unused", "exception", ("have finished reduction in the prior iteration",),
      "a parameter got no gradient, and DDP waits for it",
      "use all parameters in every step, or set find_unused_parameters=True (--strategy.find_unused_parameters true)"),
    S("mismatch", "exception", ("Detected mismatch between collectives",),
      "ranks {a} and {b} called different collectives, or with different shapes", _SAME_PATH,
      r"on ranks\. Rank (?P<a>\d+) is running (?:inconsistent )?collective: .*?but Rank (?P<b>\d+) is running"),
    S("gloo-size", "exception", ("op.preamble.length",),
      "it met another rank in one collective with different amounts of data", _SAME_PATH, r"op\.preamble\.length <="),
    S("model-differs", "exception", ("appears not to match", "DDP expects same model across all ranks"),
      "the ranks' models differ",
      "build the same model on every rank: no branch on the rank, and the same config and version on each host",
      r"params\[\d+\] in this process with (?:sizes|strides) .* appears not to match|DDP expects same model across"),
    S("state-dict", "exception", ("loading state_dict for",),
      "the checkpoint does not fit the model",
      "load it into the model that saved it; keys with `module.` or `_orig_mod.` come from a wrapped model: save "
      "model.module.state_dict()",
      r"Error\(s\) in loading state_dict for"),
    S("not-finite", "exception",
      ("oss is nan", "oss is NaN", "oss is not finite", "loss=nan", "oss: nan", "'loss': nan", "returned nan values"),
      "the loss or a gradient is no number any more",
      "lower the learning rate, clip gradients, or use bfloat16 in place of float16; autograd's detect_anomaly names "
      "the operation", is_weak=True),
    S("no-module", "exception", ("ModuleNotFoundError: ",),
      "Python finds no module {name}",
      "install it where the ranks run, on every host or in the image: `python -m pip install …` with the ranks' own "
      "python", r"ModuleNotFoundError: No module named '(?P<name>[^']+)'", is_weak=True),
    S("import", "exception", ("ImportError: ",),
      "an import failed: {why}",
      "versions of packages do not fit each other: compare `pip list` with a host that works",
      r"\bImportError: (?P<why>.{1,160})", is_weak=True),
    S("no-file", "exception", ("No such file or directory",),
      "a file is missing",
      "the path must exist on every host: copy it there, or use a shared file system",
      r"FileNotFoundError: .*No such file or directory: ['\"]"
      r"|can't open file '.+': .*No such file", is_weak=True),
    S("segfault", "exception", ("egmentation fault",),
      "native code crashed (segmentation fault)",
      "PYTHONFAULTHANDLER=1 shows where; an extension built for another version of PyTorch is the usual reason",
      r"Fatal Python error: Segmentation fault|Segmentation fault \(core dumped\)|task \d+: Segmentation fault"),
    S("worker", "exception", ("exited unexpectedly",),
      "a data worker ended by itself", "run once with --data.workers 0: its own error shows then",
      r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) exited unexpectedly", is_weak=True),
    S("terminate", "exception", ("terminate called without an active exception",),
      "it was torn down while a thread still ran",
      "meet in a barrier, then call destroy_process_group(), before the program ends", is_weak=True),
    S("nccl-system", "environment", ("unhandled system error", "ncclSystemError"),
      "NCCL met an error of the system",
      "run again with NCCL_DEBUG=INFO and look for the first `NCCL WARN`: interface, firewall, /dev/shm or memlock",
      is_weak=True),
    S("nccl-cuda", "environment", ("unhandled cuda error", "ncclUnhandledCudaError"),
      "NCCL met an error of CUDA",
      "run again with NCCL_DEBUG=INFO and look for the first `NCCL WARN`: GPUs of one host shared by two ranks, a "
      "driver too old, or a full GPU", is_weak=True),

    # Victims: another rank, or the way to it, is gone or late
    S("nccl-timeout", "collective", ("Watchdog caught collective operation timeout",),
      "rank {rank} waited {ms} ms in vain for the others in {op} #{number}", _LATE,
      r"\[Rank (?P<rank>\d+)\] Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<number>\d+), "
      r"OpType=(?P<op>\w+),.* ran for (?P<ms>\d+) milliseconds"),
    S("barrier", "collective", ("failed to pass monitoredBarrier",),
      "rank {ranks} did not come to a barrier",
      "look into the log of rank {ranks}: it hangs, ended, or went another way",
      r"Ranks? (?P<ranks>\d+[\d, ]*) failed to pass monitoredBarrier"),
    S("clients", "collective", ("clients joined",),
      "only {came} ranks came",
      "look for those that were not started or could not connect; does WORLD_SIZE fit what was started? " + _NET,
      r"Timed out after \d+ seconds waiting for clients\. (?P<came>\d+/\d+) clients joined"),
    S("connect-timeout", "collective", ("client socket has timed out after",),
      "rank 0 was not to be reached at {address}",
      "see whether rank 0 was started and what its log says. " + _NET,
      r"client socket has timed out after \S+ while trying to connect to \((?P<address>[^)]+)\)"),
    S("gloo-timeout", "collective", ("Timed out waiting", "Application timeout caused pair closure"),
      "it waited in vain for another rank", _LATE,
      r"Timed out waiting \d+ms for (?:recv|send) operation|Application timeout caused pair closure"),
    S("store-timeout", "collective", ("wait timeout after", "Socket Timeout"),
      "it waited in vain for what another rank had to say at the start", _LATE,
      r"wait timeout after \d+ms, keys: |(?:RuntimeError|DistStoreError|DistNetworkError): Socket Timeout"),
    S("nccl-remote", "collective",
      ("ncclRemoteError", "remote process exited or there was a network error", "NCCL communicator was aborted"),
      "another rank ended, or the network to it failed", _OTHER_LOG),
    S("store-gone", "collective", ("recvValue failed", "sendBytes failed", "\"should dump\" flag"),
      "rank 0, which keeps the store, is gone", "look into rank 0's log: it ended first"),
    S("peer-gone", "collective",
      ("onnection reset by peer", "onnection closed by peer", "onnection closed by remote peer", "roken pipe"),
      "another rank ended in mid-talk", _OTHER_LOG,
      r"(?i)(?:gloo|nccl|c10d|socket|peer \[).*(?:connection (?:reset by peer|closed by (?:remote )?peer)|broken pipe)"
      r"|(?:ConnectionResetError|RuntimeError): .*onnection (?:reset|closed) by peer"),
    S("refused", "collective", ("onnection refused",),
      "nobody listens where another rank should be",
      "see whether that rank was started, and what its log says. " + _NET),
    S("cancelled", "collective", (" CANCELLED AT ",),
      "Slurm ended the step, because a rank had failed or somebody cancelled it", _OTHER_LOG,
      r"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+ \*\*\*"),
    S("torchrun-failed", "collective", ("failed (exitcode:",),
      "local rank {rank} ended with status {code}", "see that rank's own log; " + _OTHER_LOG,
      r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<rank>\d+)"),
)  # fmt: skip
