//! Integration tests, one program: a module a subject.

mod common;
mod fencing;
mod hostile;
mod lengths;
mod port_groups;
mod serving;
mod targets;
mod units;
