//! Integration tests, one program: a module a subject.

mod common;
mod cores;
mod events;
mod executor;
mod files;
mod messages;
mod model;
mod ranges;
mod shared;
mod sockets;
mod steps;
