//! Registrations and directories against a real etcd, which is paused, killed, emptied and lied to.
//!
//! `scripts/get-etcd DIR` fetches one; `BATON_ETCD` names it. Without it these tests fail: membership that was never run
//! against etcd is not tested.

#![forbid(unsafe_code)]

mod etcd_process;
mod faults;
mod fencing;
mod gate;
mod kit;
mod records;
mod security;
