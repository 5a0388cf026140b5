"""Times tensor-parallel training steps of GPT-2 in PyTorch: DTensor, sequence parallelism, and on GPUs async TP.

    python3 -m torch.distributed.run --standalone --nproc_per_node 2 dev/bench/peers/torch_tp.py --model d12 \\
        --device cuda --compile [--json FILE]

peers.py runs it beside train_gpt --tp. The model is torch_step.py's; attention and MLP are cut by heads and columns,
the vocabulary by rows, activations between them by tokens, as train_gpt does. --compile on GPUs turns on async TP:
gathers and reduce-scatters are cut up and overlapped with their matmuls. Weights, gradients and AdamW's moments are
bf16, with no fp32 masters, which is less work than train_gpt does. Never run on GPUs: there is what was run, on two
CPU ranks over gloo.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, loss_parallel
from torch.distributed.tensor.parallel import parallelize_module

from torch_step import GPT, adamw_of, parser_of, timed_steps, write_json


def cut(model, mesh):
    """Cuts the model over the mesh's ranks; what lies between its operations is cut by tokens, dimension 1."""

    def columns(**how):
        return ColwiseParallel(input_layouts=Shard(1), **how)

    def rows(inputs):
        return RowwiseParallel(input_layouts=inputs, output_layouts=Shard(1))

    plan = {
        "wte": rows(Replicate()),
        "wpe": rows(Replicate()),
        "lnf": SequenceParallel(),
        "head": columns(output_layouts=Shard(-1), use_local_output=False),
    }
    for i in range(len(model.blocks)):
        plan[f"blocks.{i}.ln1"] = plan[f"blocks.{i}.ln2"] = SequenceParallel()
        plan[f"blocks.{i}.qkv"] = plan[f"blocks.{i}.fc"] = columns()
        plan[f"blocks.{i}.attproj"] = plan[f"blocks.{i}.fcproj"] = rows(Shard(-1))
    parallelize_module(model, mesh, plan)
    model.head.weight = model.wte.weight  # each was cut by itself


def async_tp(mesh):
    import torch._inductor.config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    enable_symm_mem_for_group(mesh.get_group().group_name)
    torch._inductor.config._micro_pipeline_tp = True


def main(argv):
    o = parser_of(__doc__).parse_args(argv)
    rank, P = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    if o.model["NH"] % P or o.time % P:
        sys.exit(f"torch_tp.py: {P} ranks do not divide {o.model['NH']} heads and {o.time} tokens")
    if o.device == "cuda":
        torch.cuda.set_device(rank)
    mesh = init_device_mesh(o.device, (P,))
    torch.manual_seed(42)  # all ranks draw the whole model
    o.model["maxT"] = max(o.model["maxT"], o.time)
    model = GPT(**o.model).to(o.device, torch.bfloat16)
    x, y = torch.randint(0, o.model["V"], (2, o.batch, o.time), device=o.device)
    positions = torch.arange(o.time, device=o.device).unsqueeze(0)
    cut(model, mesh)
    optimizer = adamw_of(model)
    if o.compile and o.device == "cuda":
        async_tp(mesh)
    called = torch.compile(model) if o.compile else model

    def step():
        with loss_parallel():
            loss = called(x, y, positions, None)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return (loss.full_tensor() if hasattr(loss, "full_tensor") else loss).item()

    figures = timed_steps(step, o, print if rank == 0 else lambda *text, **how: None)
    if o.json and rank == 0:
        write_json(o.json, dict(figures, precision="bf16", ranks=P))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
