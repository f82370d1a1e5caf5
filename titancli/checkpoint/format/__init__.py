"""The files of a checkpoint: safetensors beside JSON, read and written under torch.distributed.checkpoint."""
