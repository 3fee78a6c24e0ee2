//! Integration tests, one program: a module a subject.

mod clones;
mod common;
mod crash;
mod crash_snapshots;
mod device;
mod faults;
mod features;
mod images;
mod locks;
mod manage;
mod object_map;
mod reserved;
mod shared;
mod snapshots;
mod trash;
