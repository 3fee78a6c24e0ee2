//! Integration tests, one program: a module a subject.

mod fence;
mod range_lock;
mod remote;
