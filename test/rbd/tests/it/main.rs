//! Integration tests, one program: a module a subject.

mod clones;
mod own_blocks;
