# The options of an OpenRLHF example (examples/scripts/train_dpo_llama.sh) with values of our own.
set -x

read -r -d '' training_commands <<EOF
openrlhf.cli.train_dpo \
   --save_path ./checkpoint/dpo \
   --save_steps -1 \
   --logging_steps 1 \
   --eval_steps -1 \
   --train_batch_size 128 \
   --micro_train_batch_size 2 \
   --pretrain some/sft-8b \
   --param_dtype bf16 \
   --max_epochs 1 \
   --max_len 2048 \
   --learning_rate 6e-7 \
   --beta 0.1 \
   --dataset some/pairs \
   --apply_chat_template \
   --chosen_key chosen \
   --rejected_key rejected \
   --attn_implementation flash_attention_2 \
   --load_checkpoint \
   --packing_samples \
   --gradient_checkpointing
EOF
    # --ipo [for IPO]

if [[ ${1} != "slurm" ]]; then
    torchrun --standalone --nproc-per-node ${NPROC_PER_NODE:-8} -m $training_commands
fi
