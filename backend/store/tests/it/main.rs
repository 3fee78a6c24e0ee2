//! Integration tests, one program: a module a subject.

mod anchors;
mod blob_reads;
mod blobs;
mod common;
mod conformance;
mod damage;
mod damaged_index;
mod devices;
mod encryption;
mod flip;
mod grow;
mod host;
mod lost_records;
mod memory;
mod moves;
mod ranges;
mod rebuild;
mod store;
mod upkeep;
