//! RBD images: thin volumes over objects.
