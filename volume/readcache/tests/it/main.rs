//! Integration tests, one program: a module a subject.

mod common;
mod crash;
mod disk;
mod model;
mod own_blocks;
mod sharing;
