"""Read and write safetensors files in Hugging Face's layout."""
