//! Integration tests, one program: a module a subject.

mod common;
mod disks;
mod events;
mod management;
mod reservations;
