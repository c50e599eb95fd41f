"""Send requests to the Cloud TPU API.

Only `authorization`, `client`, `convert` and `errors` import Google's packages, and only if the kind is enabled.
"""
