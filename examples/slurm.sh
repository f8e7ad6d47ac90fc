#!/bin/bash
# pretrain.py on several nodes: `sbatch --nodes 4 examples/slurm.sh --config config.json --data tokens.npy --out runs/a`.
# Give the same command again, and the run goes on from its last checkpoint.
#SBATCH --job-name=pretrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append

# One torchrun a node starts a process per GPU. They meet on the first node.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# NCCL finds InfiniBand and NVLink by itself; where it takes the wrong interface, name yours:
# export NCCL_SOCKET_IFNAME=ib0 NCCL_IB_HCA=mlx5
export NCCL_DEBUG=WARN                                   # INFO says which network it took
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True  # less memory is lost to fragmentation
export OMP_NUM_THREADS=8
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1              # or torch 2.13's restarted processes hang (pytorch#135712)

# A process that dies ends those of all nodes; torchrun starts them again, up to 3 times, and pretrain.py resumes from
# its last complete checkpoint. If a node dies, so does the job: Slurm queues it again (--requeue), and it resumes.
srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$SLURM_GPUS_ON_NODE" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first:29500" \
    examples/pretrain.py "$@"
