"""Define the custom resources as values. The CRDs are generated from these types, and every other module reads them."""
