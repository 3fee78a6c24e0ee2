//! Integration tests, one program: a module a subject.

mod clones;
mod common;
mod config;
mod crash;
mod crash_snapshots;
mod device;
mod faults;
mod images;
mod locks;
mod object_map;
mod reserved;
mod shared;
mod snapshots;
