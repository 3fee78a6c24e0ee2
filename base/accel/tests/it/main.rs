//! Integration tests, one program: a module a subject.

mod crc32c;
mod erasure;
mod shape;
