"""Read and write safetensors files as Hugging Face lays them out."""
