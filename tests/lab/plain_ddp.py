"""A plain DistributedDataParallel script, as anybody writes it: it knows nothing of Muster.

plain_ddp.py STEPS SEED [RANK CODE]: that rank runs that code before its sixth step.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, steps, seed = dist.get_rank(), int(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(seed)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.Generator().manual_seed(rank)
for step in range(steps):
    if step == 5 and len(sys.argv) > 3 and rank == int(sys.argv[3]):
        exec(sys.argv[4])
    x = torch.randn(16, 8, generator=data)
    loss = ((model(x) - x.sum(dim=1, keepdim=True)) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} of seed {seed}: loss {loss.item():.4f}", flush=True)
    time.sleep(0.05)
print(f"seed {seed} ends with {model.module.weight.sum().item():.6f} on {os.uname().nodename}", flush=True)
dist.barrier()
dist.destroy_process_group()
