//! Integration tests, one program: a module a subject.

mod changes;
mod clones;
mod common;
mod config;
mod crash;
mod crash_clones;
mod crash_snapshots;
mod device;
mod families;
mod faults;
mod features;
mod groups;
mod images;
mod locks;
mod manage;
mod namespaces;
mod object_map;
mod owner;
mod reserved;
mod shared;
mod snapshots;
mod sparsify;
mod striping;
mod trash;
