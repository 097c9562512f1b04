# The options of an OpenRLHF example (examples/scripts/train_ppo_ray_hybrid_engine.sh) with values of our own.
set -x

python3 -m openrlhf.cli.train_ppo_ray \
   --ref_num_nodes 1 \
   --ref_num_gpus_per_node 8 \
   --reward_num_nodes 1 \
   --reward_num_gpus_per_node 8 \
   --critic_num_nodes 1 \
   --critic_num_gpus_per_node 8 \
   --actor_num_nodes 1 \
   --actor_num_gpus_per_node 8 \
   --vllm_num_engines 4 \
   --vllm_tensor_parallel_size 2 \
   --colocate_all_models \
   --vllm_gpu_memory_utilization 0.5 \
   --pretrain some/sft-8b \
   --reward_pretrain some/rm-8b \
   --save_path final/ppo \
   --ckpt_path ckpt/ppo \
   --save_hf_ckpt \
   --train_batch_size 64 \
   --rollout_batch_size 512 \
   --n_samples_per_prompt 1 \
   --max_epochs 1 \
   --prompt_max_len 512 \
   --max_samples 50000 \
   --generate_max_len 768 \
   --zero_stage 3 \
   --param_dtype bf16 \
   --actor_learning_rate 4e-7 \
   --critic_learning_rate 8e-6 \
   --init_kl_coef 0.02 \
   --prompt_data some/prompts \
   --input_key messages \
   --apply_chat_template \
   --normalize_reward \
   --gradient_checkpointing \
   --packing_samples \
   --vllm_sync_backend nccl \
   --enforce_eager \
   --vllm_enable_sleep \
   --deepspeed_enable_sleep \
   --use_dynamic_batch \
   --train_max_tokens_per_gpu 8192 \
   --enable_vllm_is_correction

# Enable tensor parallelism for DeepSpeed
#    --ds_tensor_parallel_size 2 \
