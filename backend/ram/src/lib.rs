//! Objects in memory, lost when the daemon stops; the plain model that the other backends are tested against.
