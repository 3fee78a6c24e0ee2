//! Compression: codecs, and the engines that run them beside the reactors.
