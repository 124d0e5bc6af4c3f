//! Owns membership by etcd: keeping one entry registered (`Registration`) and seeing who else is (`Directory`).
//! Never decides who serves: load and liveness stay on the status streams, so etcd being away evicts nobody.
//! Read first: `registration.rs`, its loop of one screen; then `tracker.rs`, which is pure, and `directory.rs`, its shell.
//! Which failure each part is for (FAILURES E): a registration never gives up (E1, lost leases); a directory lists on each
//! connect and watches from there (E2, missed deletes), has a clock of its own for silence (E3, paused server), applies
//! by revision and lists anew every few minutes (E4, events sent late, twice or never).
//! Tests: beside the code; `tests/against_etcd/` starts a real etcd, which `scripts/get-etcd` fetches.

mod address;
mod back_off;
mod claim;
mod connection;
mod directory;
mod entry;
mod entry_fields;
mod registration;
mod source;
mod tracker;
mod trouble;
mod view;

pub use address::{AddressError, ClusterName, EtcdAddress};
pub use directory::{Directory, DirectoryConfig};
pub use entry::{BadRecord, CoordinatorEntry, Entry, NodeEntry, RECORD_BYTES_MAX};
pub use registration::{Registration, RegistrationConfig, RegistrationHealth};
pub use trouble::EtcdTrouble;
pub use view::View;
