//! Who a process is: a certificate for each process, mutual TLS between all of them, and which role may call what.
//!
//! A certificate names its process as `spiffe://CLUSTER/ROLE/NAME` ([`PeerName`]; the form is that of the SPIFFE ID specification).
//! [`Identity`] holds a process's own certificate and the authority of its cluster, dials others and accepts them. Without
//! certificates it is [`Identity::none`], and everything is in plain text; [`TlsConfig::check_address`] allows that on loopback only.
//! [`ServerCertificate`] is what a coordinator shows to clients, who have keys in place of certificates.
//!
//! The files are read again when they change ([`Renewed`]). New connections use the new
//! certificate. An open connection goes on, also after its certificate has expired; no session is resumed after it.

#![forbid(unsafe_code)]

mod access;
mod authority;
mod connect;
mod connection;
mod expected;
mod files;
mod name;
mod own;
mod renewed;
mod server;
mod verify;

pub use access::{Caller, Refused, check_call};
pub use authority::{Authority, AuthorityError, CertificateFiles, CertifiedProcess, in_days};
pub use connection::Connection;
pub use expected::Expected;
pub use files::{FileError, TlsConfig, certificates};
pub use name::{PeerName, PeerRole};
pub use own::{AcceptError, Identity, IdentityError};
pub use renewed::Renewed;
pub use server::ServerCertificate;
