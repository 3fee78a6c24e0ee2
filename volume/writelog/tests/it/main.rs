//! Integration tests, one program: a module a subject.

mod allocate;
mod attachment;
mod common;
mod damage;
mod encryption;
mod failures;
mod give_back;
mod hostile;
mod hostile_ssd;
mod log;
mod order;
mod peers;
mod replica;
mod replication;
