//! Integration tests, one program: a module a subject.

mod common;
mod cores;
mod executor;
mod files;
mod model;
mod ranges;
mod sockets;
