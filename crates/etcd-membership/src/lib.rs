//! Owns membership by etcd: it keeps one entry registered (`Registration`) and shows which entries exist (`Directory`).
//! Never decides who serves: load and liveness stay on the status streams, so an etcd that is away evicts no node.
//! Read first: the loop of `registration.rs`; then `tracker.rs`, which is pure, and `directory.rs`, its shell.
//! Failures of etcd: a registration never gives up, so it survives a lost lease. A directory lists all entries on each
//! connect and watches from there, so it misses no delete. It measures silence by its own clock, so it notices a paused
//! server. It applies events by revision and lists anew every few minutes, so late, repeated or lost events do no harm.
//! Tests: beside the code; `tests/against_etcd/` starts a real etcd, which `scripts/get-etcd` fetches.

#![forbid(unsafe_code)]

mod address;
mod back_off;
mod claim;
mod connection;
mod directory;
mod entry;
mod entry_fields;
mod first_answer;
mod registration;
mod registration_health;
mod source;
mod tracker;
mod trouble;
mod view;

pub use address::{AddressError, ClusterName, EtcdAddress, OfProcess};
pub use directory::{Directory, DirectoryConfig};
pub use entry::{BadRecord, CoordinatorEntry, Entry, NodeEntry, RECORD_BYTES_MAX, decode_at, epoch_of};
pub use first_answer::first_answer;
pub use registration::{Registration, RegistrationConfig};
pub use registration_health::RegistrationHealth;
pub use trouble::EtcdTrouble;
pub use view::View;
