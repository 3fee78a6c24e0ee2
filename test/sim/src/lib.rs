//! A virtual disk, network and clock behind the reactor's driver trait, replayed from a seed.
