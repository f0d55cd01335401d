"""Lines that failures leave in logs, one or more for each known signature, and lines that only look like them.

Those marked `made here` are what PyTorch 2.13 prints; the others are from public bug reports, sources and manuals,
shortened at most.
"""
# ruff: noqa: E501 - as they were printed

from __future__ import annotations

GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/"

SAMPLES: list[tuple[str, str, str]] = [  # name, a line that must be found, one that must not (by this signature)
    # Ports and addresses
    ("port-in-use",  # made here
     "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: "
     "26100, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
     "[E1129 21:09:39.841 socket.cpp:1028] OSError: [Errno 98] Address already in use"),
    ("port-in-use",  # showlab/Tune-A-Video#90
     "RuntimeError: The server socket has failed to listen on any local network address. The server socket has failed "
     "to bind to [::]:29500 (errno: 98 - Address already in use). The server socket has failed to bind to "
     "0.0.0.0:29500 (errno: 98 - Address already in use).",
     "The server socket has started to listen on 0.0.0.0:29500."),
    ("port-in-use",  # Docker
     "Bind for 0.0.0.0:29500 failed: port is already allocated", "0.0.0.0:29500 -> 29500/tcp"),
    ("address-in-use",  # SJTU-IPADS/OS-Course-Lab#99
     "OSError: [Errno 98] Address already in use", "OSError: [Errno 99] Cannot assign requested address"),
    ("no-interface",  # NVIDIA/Megatron-LM#436
     "RuntimeError: [enforce fail at /root/pytorch/third_party/gloo/gloo/transport/tcp/device.cc:83] ifa != nullptr. "
     "Unable to find address for: bond1", "Unable to find address for the customer"),
    ("no-interface",  # gpustack/gpustack#4128
     "RuntimeError: [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/device.cc:212] ifa != nullptr. "
     "Unable to find interface for: [0.0.0.189]", "Unable to find the config"),
    ("nccl-no-interface",  # NVIDIA/nccl bootstrap.cc
     "node1:97:97 [0] bootstrap.cc:45 NCCL WARN Bootstrap : no socket interface found",
     "my tool: no socket interface found"),
    ("ssh-host-key", "Host key verification failed.", "host key verification is on"),  # OpenSSH
    ("ssh-host-key", "@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @", "remote host identification: ok"),
    ("ssh-denied", "root@node2: Permission denied (publickey,password).", "open: Permission denied (os error 13)"),
    ("ssh-connect", "ssh: connect to host node2 port 22: No route to host", "ssh: connected to host node2"),
    ("ssh-connect", "ssh: connect to host 10.0.0.9 port 22: Connection refused", "will connect to host node2 at noon"),
    ("c10d-name",  # made here
     "[W1129 21:09:43.189658764 socket.cpp:764] [c10d] The IPv6 network addresses of (nosuchhost.invalid, 26101) cannot "
     "be retrieved (gai error: -2 - Name or service not known).", "The network addresses of all hosts are in the file."),
    ("name", "socket.gaierror: [Errno -2] Name or service not known", "the name or the service is known"),
    ("name", "ssh: Could not resolve hostname node9: Temporary failure in name resolution", "name resolution works"),
    ("no-route",  # sgl-project/sglang#3820
     "node5:240:240 [6] misc/socket.cc:533 NCCL WARN socketPollConnect: Connect to 10.0.0.4<56849> returned 113(No route "
     "to host) errno 115(Operation now in progress)", "the route to host 4 goes by eth0"),
    ("no-route", "OSError: [Errno 101] Network is unreachable", "the network is reachable"),
    # Memory, disk, files
    ("shm",  # made here
     "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
     "shared memory (shm): 16 GB"),
    ("shm",  # made here
     "RuntimeError: DataLoader worker (pid 9448) is killed by signal: Bus error. It is possible that dataloader's "
     "workers are out of shared memory. Please try to raise your shared memory limit.", "tmpfs 64M 0 64M 0% /dev/shm"),
    ("shm",  # NVIDIA/nccl
     "node1:29:29 [0] misc/shmutils.cc:72 NCCL WARN Error while creating shared memory segment /dev/shm/nccl-fEqrxq "
     "(size 9637888)", "NCCL INFO created shared memory segment"),
    ("shm", "RuntimeError: unable to write to file </torch_1234_567>: No space left on device (28)", "torch_1234_567"),
    ("bus-error",  # pytorch/pytorch#5040
     "RuntimeError: DataLoader worker (pid 13) is killed by signal: Bus error.", "the PCI bus errors were corrected"),
    ("bus-error", "srun: error: Orion-18-69: task 289: Bus error", "omnibus error codes"),  # HAFS#101
    ("bus-error", "Fatal Python error: Bus error", "Python error: no Bus errors"),
    ("disk-full", "OSError: [Errno 28] No space left on device", "there is space left on the device"),  # made here
    ("disk-full", "OSError: [Errno 122] Disk quota exceeded: 'last.pt'", "the disk quota is exceeded by nobody"),
    ("memlock",
     "node1:31:52 [0] misc/ibvwrap.cc:284 NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory",
     "NCCL INFO Call to ibv_reg_mr took 3 us"),
    ("slurm-oom",  # nextflow-io/nextflow#5932
     "slurmstepd: error: Detected 1 oom_kill event in StepId=11300781.0. Some of the step tasks have been OOM Killed.",
     "slurmstepd: no oom_kill event"),
    ("slurm-oom",  # ArjunaCluster/ArjunaUsers#52
     "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=191.batch cgroup. Some of your processes may have been "
     "killed by the cgroup out-of-memory handler.", "oom-kill events are counted"),
    ("slurm-oom", "srun: error: nid001277: tasks 1-3: Out Of Memory", "state: Out Of Memory"),  # chrisknewman/tusas#149
    ("kernel-oom",
     "[ 3520.789] Memory cgroup out of memory: Killed process 5678 (python3) total-vm:2345678kB, anon-rss:1234567kB",
     "Killed process 1234 at the user's wish"),
    ("kernel-oom",
     "[  510.910332] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/job_7",
     "oom-kill is off"),
    ("worker-killed", "RuntimeError: DataLoader worker (pid 9156) is killed by signal: Killed. ",  # made here
     "the hero is killed by signal: Killed"),
    ("torchrun-killed",
     "E0323 21:57:08.583000 23 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: -9) local_rank: "
     "2 (pid: 88) of binary: /opt/venv/bin/python3", "exitcode: -9 means a signal"),
    ("open-files", "OSError: [Errno 24] Too many open files: '/dev/null'", "files that are open: many"),  # made here
    ("open-files", "RuntimeError: received 0 items of ancdata", "received 0 items"),
    ("host-memory",  # made here
     "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
     "to allocate 281474976710656 bytes. Error code 12 (Cannot allocate memory)", "we allocate memory in blocks"),
    ("host-memory", "OSError: [Errno 12] Cannot allocate memory", "can allocate memory"),
    ("memory-error", "MemoryError", "OutOfHostMemoryErrorHandler installed"),
    # GPUs
    ("cuda-oom",
     "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 3 has a total capacity of "
     "79.15 GiB of which 17.75 MiB is free. Process 1234 has 79.12 GiB memory in use.", "CUDA out of memory."),
    ("cuda-oom",  # 2.1 to 2.3 wrote "capacty"
     "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacty of 23.69 GiB"
     " of which 1.44 GiB is free.", "GPU 0 has a total capacity of 79.15 GiB"),
    ("cuda-oom-old",
     "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 23.69 GiB total capacity; 20.10 GiB already "
     "allocated; 1.21 GiB free; 20.92 GiB reserved in total by PyTorch)", "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0)"),
    ("cuda-oom-plain", "RuntimeError: CUDA error: out of memory", "CUDA error: unknown error"),
    ("cuda-oom-plain", "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
     "except torch_OutOfMemoryErrors as error:"),
    ("cuda-oom-plain", "node1:52:91 [1] enqueue.cc:1402 NCCL WARN Cuda failure 'out of memory'", "got 'out of memory'"),
    ("ordinal", "RuntimeError: CUDA error: invalid device ordinal", "a valid device ordinal"),
    ("duplicate-gpu",  # NVIDIA/Megatron-LM#661
     "Duplicate GPU detected : rank 3 and rank 0 both on CUDA device f000", "no Duplicate GPU detected"),
    ("xid", "[ 1234.5] NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.", "NVRM: Xid errors: none"),
    ("gpu-broken", "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", "ECC errors: 0"),
    ("gpu-broken", "Unable to determine the device handle for GPU0000:81:00.0: GPU is lost.  Reboot the system to recover",
     "no GPU was lost"),
    ("illegal-access", "RuntimeError: CUDA error: an illegal memory access was encountered", "illegal memory access?"),
    ("device-assert", "RuntimeError: CUDA error: device-side assert triggered", "TORCH_USE_CUDA_DSA: device-side asserts"),
    ("launch-failure", "RuntimeError: CUDA error: unspecified launch failure", "launch failure of the rocket"),
    ("old-driver",
     "THCudaCheck FAIL file=/pytorch/torch/csrc/cuda/Module.cpp line=34 error=35 : CUDA driver version is insufficient "
     "for CUDA runtime version", "CUDA driver version 12.8"),
    ("old-driver", "UserWarning: CUDA initialization: The NVIDIA driver on your system is too old (found version 11040).",
     "the NVIDIA driver on your system is new"),
    ("driver-mismatch", "Failed to initialize NVML: Driver/library version mismatch", "driver and library versions match"),
    ("driver-mismatch", "nvidia-container-cli: initialization error: nvml error: driver/library version mismatch: unknown.",
     "no version mismatch"),
    ("fabric-manager", "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
     "the file system not yet initialized"),
    ("no-gpu", "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
     "Found NVIDIA driver 550"),
    ("no-gpu", "RuntimeError: No CUDA GPUs are available", "8 CUDA GPUs are available"),
    ("no-gpu", "AssertionError: Torch not compiled with CUDA enabled", "Torch compiled with CUDA"),  # made here
    ("kernel-image", "RuntimeError: CUDA error: no kernel image is available for execution on the device",
     "the kernel image is available"),
    # Containers and libraries
    ("docker-permission",
     "docker: Got permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock: "
     "connect: permission denied.", "permission denied while trying to connect to the database"),
    ("docker-permission",  # 28 on
     "permission denied while trying to connect to the docker API at unix:///var/run/docker.sock", "docker API v1.51"),
    ("docker-daemon", "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?",
     "connected to the Docker daemon"),
    ("nvidia-cli",
     "nvidia-container-cli: initialization error: WSL environment detected but no adapters were found: unknown",
     "apt install nvidia-container-cli"),
    ("nvidia-cli",
     "nvidia-container-cli: initialization error: load library failed: libnvidia-ml.so.1: cannot open shared object file: "
     "no such file or directory: unknown", "/usr/bin/nvidia-container-cli"),
    ("no-toolkit", 'docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].',
     "could not select device drivers"),
    ("no-image",
     "docker: Error response from daemon: manifest for ubuntu:22.02 not found: manifest unknown: manifest unknown.",
     "pull access denied by policy 7, or No such image/tag, or failed to import docker images"),
    ("no-image", "Error response from daemon: pull access denied for muster, repository does not exist or may require "
     "'docker login': denied: requested access to the resource is denied", "pull access granted"),
    ("no-image", "Error: No such image: muster:dev", "an image"),
    ("no-image", "slurmstepd: error: pyxis: failed to import docker image", "pyxis: importing docker image: ubuntu"),
    ("glibc",
     "ImportError: /lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.34' not found (required by /opt/venv/lib/libx.so)",
     "module 'x' not found (required by the config)"),
    ("glibc", "ImportError: /usr/lib/libstdc++.so.6: version `GLIBCXX_3.4.30' not found (required by /opt/_C.so)",
     "GLIBCXX_3.4.30"),
    ("library", "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
     "NCCL INFO NET/Plugin : cannot open shared object files"),
    # Slurm
    ("munge",  # clustervision/trinity#759
     "May 24 07:06:46 login slurmctld[15918]: error: Munge decode failed: Invalid credential", "credentials are valid"),
    ("munge", "unmunge: Error: Invalid credential", "HTTP 401: invalid credential"),
    ("munge", "slurmd: error: Munge decode failed: Rewound credential", "a rewound tape"),
    ("munge",  # omnivector-solutions/snap-slurm#78
     "srun: error: Task launch for 47.0 failed on node n-c122: Invalid job credential", "job credentials created"),
    ("munge-down",  # dun/munge#118
     'sbatch: error: Munge encode failed: Failed to access "/run/munge/munge.socket.2": No such file or directory',
     "munge.socket.2 is there"),
    ("time-limit",
     "slurmstepd: error: *** JOB 10711368 ON c0617 CANCELLED AT 2026-09-30T16:00:24 DUE TO TIME LIMIT ***",
     "this will not be studied due to time limits"),
    ("preempted", "slurmstepd: error: *** JOB 77 ON n1 CANCELLED AT 2026-09-30T16:00:24 DUE TO PREEMPTION ***",
     "NODE FAILURE is DUE TO PREEMPTIONS"),
    ("preempted", "srun: error: *** STEP 77.0 ON n1 CANCELLED AT 2026-09-30T16:00:24 DUE TO NODE FAILURE, SEE SLURMCTLD "
     "LOG FOR DETAILS ***", "node failure"),
    ("kill-task", "   State=IDLE+DRAIN Reason=Kill task failed [root@2026-09-30T16:00:24]", "pty kill task failed: 3"),
    ("kill-task", "Kill task failed     root      2023-05-02T10:11:12 n1", "Kill task failed: MythicMobs not enabled."),
    # The program
    ("mark-twice",  # made here
     "[rank0]: RuntimeError: Expected to mark a variable ready only once. This error is caused by one of the following "
     "reasons: 1) Use of a module parameter outside the `forward` function.", "expected to mark once"),
    ("mark-twice", "Parameter at index 3 with name a.weight has been marked as ready twice. This means that multiple "
     "autograd engine hooks have fired for this particular parameter during this iteration.", "ready twice a day"),
    ("unused",  # made here
     "[rank0]: RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. This "
     "error indicates that your module has parameters that were not used in producing loss.", "prior iteration: 12"),
    ("mismatch",  # made here
     "[rank0]: RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: "
     "CollectiveFingerPrint(SequenceNumber=1, OpType=ALLREDUCE, TensorShape=[2000000]), but Rank 1 is running collective:"
     " CollectiveFingerPrint(SequenceNumber=1, OpType=ALLREDUCE, TensorShape=[10])", "Detected mismatch between collectives: 0"),
    ("gloo-size",  # made here
     "  what():  [enforce fail at /__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:456] op.preamble.length "
     "<= op.nbytes. 1000000 vs 12. Received data size doesn't match expected size.", "op.preamble.length = 12"),
    ("model-differs",  # made here
     "[rank1]: RuntimeError: [1]: params[0] in this process with sizes [5, 4] appears not to match sizes of the same param "
     "in process 0.", "it appears not to match"),
    ("model-differs", "RuntimeError: DDP expects same model across all ranks, but Rank 1 has 4 params, while rank 0 has "
     "inconsistent 2 params.", "DDP expects a model"),
    ("state-dict", "RuntimeError: Error(s) in loading state_dict for GPT:", "loading state_dict for GPT"),
    ("not-finite", "ValueError: loss is nan at step 12", "the loss is not nanometres"),
    ("not-finite", "RuntimeError: Function 'LogBackward0' returned nan values in its 0th output.", "nan values: 0"),
    ("not-finite", "{'loss': nan, 'grad_norm': nan, 'learning_rate': 2e-05, 'epoch': 0.01}", "{'loss': 0.1, 'x': nan}"),
    ("no-module", "[rank0]: ModuleNotFoundError: No module named 'einops'", "ModuleNotFoundError: spec not found for the module"),
    ("import", "ImportError: cannot import name 'packaging' from 'pkg_resources' (/usr/lib/python3/pkg_resources.py)",
     "log.debug('MyImportError: optional')"),
    ("no-file", "FileNotFoundError: [Errno 2] No such file or directory: '/data/train.bin'",
     "ls: cannot access 'x': No such file or directory"),
    ("no-file", "python: can't open file '/srv/train.py': [Errno 2] No such file or directory", "can't open file"),
    ("segfault", "Fatal Python error: Segmentation fault", "a segmentation fault line of the earth"),
    ("segfault", "srun: error: n1: task 3: Segmentation fault (core dumped)", "image segmentation faults"),
    ("worker", "RuntimeError: DataLoader worker (pid(s) 9156) exited unexpectedly", "the shell exited unexpectedly"),
    ("terminate", "terminate called without an active exception",
     "terminate called after throwing an instance of 'std::runtime_error'"),
    ("nccl-system",
     "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1691, "
     "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.19.3", "a handled system error"),
    ("nccl-system",  # NVIDIA/nccl#975
     "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.", "system call"),
    ("nccl-cuda", "ncclUnhandledCudaError: Call to CUDA function failed.", "call to CUDA function"),
    # Victims
    ("nccl-timeout",  # hiyouga/LlamaFactory#7396
     "[rank0]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation timeout: "
     "WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=466119168, NumelOut=466119168, Timeout(ms)=600000) ran for 600060 "
     "milliseconds before timing out.", "Watchdog caught collective operation timeout"),
    ("nccl-timeout",  # OFA-Sys/OFA#271
     "[E ProcessGroupNCCL.cpp:737] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=469508, "
     "OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1802212 milliseconds before timing out.", "WorkNCCL(SeqNum=4)"),
    ("barrier", "[rank0]: RuntimeError: [Rank 0]: Ranks 1, 3 failed to pass monitoredBarrier in 3000 ms",  # made here
     "Ranks that failed to pass monitoredBarrier: none"),
    ("clients",  # made here
     "torch.distributed.DistStoreError: Timed out after 3 seconds waiting for clients. 1/2 clients joined.",
     "two clients joined"),
    ("connect-timeout",  # made here
     "torch.distributed.DistNetworkError: The client socket has timed out after 2000ms while trying to connect to "
     "(127.0.0.1, 26101).", "The client socket has timed out after a while"),
    ("gloo-timeout", f"RuntimeError: {GLOO}unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete",
     "Timed out waiting for a bus"),  # made here
    ("gloo-timeout",
     f"RuntimeError: {GLOO}pair.cc:553] Application timeout caused pair closure", "timeout of the application"),
    ("store-timeout",
     "torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//cpu//0/1", "wait timeouts"),
    ("store-timeout", "RuntimeError: Socket Timeout", "set_option('Socket Timeout', 3)"),
    ("nccl-remote",  # NVIDIA/nccl#934
     "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
     "a remote process exited"),
    ("store-gone",  # sgl-project/sglang#20859
     "[rank12]:[W318 10:00:41.915284135 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=135, addr=[a]:48750, "
     "remote=[b]:20000): Connection reset by peer", "recvValue returned 3"),
    ("store-gone",
     "[rank2]:[W112 01:48:44.277417495 ProcessGroupNCCL.cpp:1771] [PG ID 0 PG GUID 0 Rank 2] Failed to check the \"should "
     "dump\" flag on TCPStore, (maybe TCPStore server has shut down too early), with error: Broken pipe", "should dump"),
    ("peer-gone",  # made here
     f"[rank0]: RuntimeError: {GLOO}pair.cc:537] Read error [127.0.0.1]:1927: Connection reset by peer. This is typically "
     "caused by a remote worker hanging or bugs in the application.", "wget: connection reset by peer, retrying"),
    ("peer-gone",  # made here
     f"[rank1]: RuntimeError: {GLOO}pair.cc:553] Connection closed by peer [127.0.0.1]:20902. This is typically caused by "
     "a remote worker crashing.", "the connection was closed by us"),
    ("peer-gone",  # NVIDIA/nccl#1612
     "[0] misc/socket.cc:71 NCCL WARN socketProgress: Connection closed by remote peer 10.10.1.3<36138>",
     "yes: standard output: Broken pipe"),
    ("refused",  # espnet/espnet#1940
     "tj1:41449:41449 [6] include/socket.h:390 NCCL WARN Connect to 10.38.10.112<21724> failed : Connection refused",
     "the connection was not refused"),
    ("cancelled", "slurmstepd: error: *** STEP 440575.0 ON nid001277 CANCELLED AT 2023-12-05T07:16:01 ***",
     "flight 12 CANCELLED AT noon"),
    ("torchrun-failed",  # NVIDIA/nccl#1657
     "E0323 21:57:08.583000 23 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1) local_rank: 0 "
     "(pid: 88) of binary: /opt/venv/bin/python3", "job 7 failed (exitcode: 1)"),
]  # fmt: skip
