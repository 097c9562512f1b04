#!/bin/bash
# The options of an OpenRLHF example (examples/scripts/train_reinforce_baseline_hybrid_engine.sh), values of our own.
MODEL_PATH="some/Thinking-4B"
SAVE_PATH="exp/thinking"

CKPT_ARGS=(
   --pretrain ${MODEL_PATH}
   # --reward_pretrain ${REWARD_MODEL}
   --load_checkpoint

   --save_path ${SAVE_PATH}
   --ckpt_path "${SAVE_PATH}/ckpt"
   --save_hf_ckpt
   --max_ckpt_num 3
   --save_steps 10
)

ROLLOUT_ARGS=(
   --remote_rm_url reward.py
   --prompt_data some/math
   --input_key prompt
   --label_key label
   --prompt_max_len 1024
   --generate_max_len 4096
   --apply_chat_template
   --packing_samples
   --rollout_batch_size 64
   --n_samples_per_prompt 8
   --train_batch_size 512
   --dynamic_filtering
   --dynamic_filtering_reward_range 0.0 1.0
   --micro_train_batch_size 1
   --micro_rollout_batch_size 8
   --max_epochs 1
   --num_episodes 2
)

ENGINE_ARGS=(
   --ref_num_nodes 1
   --ref_num_gpus_per_node 4
   --actor_num_nodes 1
   --actor_num_gpus_per_node 4
   --vllm_num_engines 2
   --vllm_tensor_parallel_size 2
   --vllm_gpu_memory_utilization 0.7
   --colocate_all_models
   --vllm_sync_backend nccl
   --enforce_eager
   --gradient_checkpointing
   --ring_attn_size 2
   --ring_head_stride 2
   --param_dtype bf16
)

OPTIMIZER_ARGS=(
   --advantage_estimator reinforce_baseline
   --actor_learning_rate 5e-7
   --entropy_loss_coef 0.0
   --init_kl_coef 1e-5
   --use_kl_loss
   --kl_estimator k2
   --enable_vllm_is_correction
   --eps_clip_low_high 0.2 0.27
)

ray job submit --address="http://127.0.0.1:8265" \
   -- python3 -m openrlhf.cli.train_ppo_ray \
   ${CKPT_ARGS[@]} \
   ${ROLLOUT_ARGS[@]} \
   ${ENGINE_ARGS[@]} \
   ${OPTIMIZER_ARGS[@]} \
   --use_tensorboard ${SAVE_PATH}/runs \
   --logging_steps 1 \
   --eval_steps -1
