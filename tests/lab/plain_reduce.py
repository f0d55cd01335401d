"""A plain script of all-reduces, without DistributedDataParallel and the seconds that it takes to import.

plain_reduce.py STEPS SEED [RANK CODE]: that rank runs that code before its sixth step.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, steps, seed = dist.get_rank(), int(sys.argv[1]), int(sys.argv[2])
data = torch.Generator().manual_seed(1000 * seed + rank)
weight = torch.zeros(8)
for step in range(steps):
    if step == 5 and len(sys.argv) > 3 and rank == int(sys.argv[3]):
        exec(sys.argv[4])
    gradient = torch.randn(8, generator=data)
    dist.all_reduce(gradient)
    weight -= 0.1 * gradient
    print(f"step {step} of seed {seed}", flush=True)
    time.sleep(0.05)
print(f"seed {seed} ends with {weight.tolist()} on {os.uname().nodename}", flush=True)
dist.barrier()
dist.destroy_process_group()
