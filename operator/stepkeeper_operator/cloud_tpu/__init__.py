"""Talk to the Cloud TPU API. Only `client` and `convert` import google's packages, and only where the kind is on."""
