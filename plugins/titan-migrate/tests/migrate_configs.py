"""Configs of our own, with the keys that the tools' examples use."""

AXOLOTL = """\
base_model: someone/Small-1B
load_in_4bit: false
adapter: lora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
datasets:
  - path: someone/talks
    type: chat_template
    field_messages: conversations
    message_property_mappings:
      role: from
      content: value
    split: train[:20%]
val_set_size: 0.05
sequence_len: 1024
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
max_steps: 50
num_epochs: 2
optimizer: adamw_torch_fused
lr_scheduler: cosine
learning_rate: 2e-4
warmup_ratio: 0.1
bf16: auto
gradient_checkpointing: true
flash_attention: true
saves_per_epoch: 1
evals_per_epoch: 5
weight_decay: 0.0
special_tokens:
  pad_token: "<pad>"
output_dir: ./out
wandb_project:
"""
LLAMAFACTORY = """\
model_name_or_path: someone/Small-1B
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: q_proj,v_proj
dataset: talks
template: qwen
cutoff_len: 512
max_samples: 100
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
output_dir: saves
report_to: none
"""
TORCHTUNE = """\
output_dir: /tmp/tuned
model:
  _component_: torchtune.models.llama3_2.lora_llama3_2_1b
  lora_attn_modules: ['q_proj', 'v_proj']
  lora_rank: 16
  lora_alpha: 32
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  path: /models/small/tokenizer.model
  max_seq_len: 512
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: /models/small
  checkpoint_files: [model.safetensors]
  output_dir: ${output_dir}
  model_type: LLAMA3_2
dataset:
  _component_: torchtune.datasets.alpaca_cleaned_dataset
  packed: True
seed: 7
shuffle: True
batch_size: 2
optimizer:
  _component_: torch.optim.AdamW
  fused: True
  lr: 3e-4
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 10
loss:
  _component_: torchtune.modules.loss.LinearCrossEntropyLoss
epochs: 1
max_steps_per_epoch: 40
gradient_accumulation_steps: 8
clip_grad_norm: null
dtype: bf16
enable_activation_checkpointing: True
metric_logger:
  _component_: torchtune.training.metric_logging.DiskLogger
  log_dir: ${output_dir}/logs
"""
ALL = {"axolotl": AXOLOTL, "llamafactory": LLAMAFACTORY, "torchtune": TORCHTUNE}
