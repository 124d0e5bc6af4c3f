//! Why etcd cannot be used. Registrations, directories, logs and health pages share this type.

use thiserror::Error;

use crate::address::AddressError;
use crate::entry_fields::shown;

/// Texts of refusals whose code has another meaning (InvalidArgument or FailedPrecondition): a wrong password, no user
/// where one is needed, and a user where etcd has none.
const AUTHENTICATION_WORDS: [&str; 3] = [
    "authentication failed",
    "user name is empty",
    "authentication is not enabled",
];

/// The purpose of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Connect,
    GrantLease,
    KeepLease,
    RevokeLease,
    Read,
    Write,
    List,
    Watch,
}

impl Call {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Connect => "connect",
            Self::GrantLease => "grant a lease",
            Self::KeepLease => "renew the lease",
            Self::RevokeLease => "revoke the lease",
            Self::Read => "read the own record",
            Self::Write => "write the own record",
            Self::List => "list the records",
            Self::Watch => "watch the records",
        }
    }
}

/// Why etcd cannot be used right now. All but [`EtcdTrouble::is_for_a_person`] pass by themselves. None ends a retry.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum EtcdTrouble {
    #[error("etcd has not answered yet")]
    NotYet,
    #[error("cannot read {path}: {detail}; the etcd address names it, or tls_ca, tls_cert or tls_key")]
    TlsFile { path: String, detail: String },
    #[error("{}", AddressError::NoCa)]
    NoCa,
    #[error("{endpoint} did not {call} within {limit_ms} ms")]
    TimedOut {
        endpoint: String,
        call: &'static str,
        limit_ms: u64,
    },
    #[error("cannot reach {endpoint} to {call}: {detail}")]
    Unreachable {
        endpoint: String,
        call: &'static str,
        detail: String,
    },
    #[error("{endpoint} does not let this user {call}: {detail}; check the user, its password and its role in etcd")]
    NotAllowed {
        endpoint: String,
        call: &'static str,
        detail: String,
    },
    #[error(
        "no TLS with {endpoint}: {detail}; check etcd's certificate (not P-521) and ca, cert and key of its address"
    )]
    Tls { endpoint: String, detail: String },
    #[error("{endpoint} failed to {call}: {detail}")]
    Failed {
        endpoint: String,
        call: &'static str,
        detail: String,
    },
    #[error("etcd has lost the lease")]
    LeaseLost,
    #[error("another process keeps writing this process's record; two processes have one name")]
    Contended,
    #[error("this process's own record cannot be written: {detail}")]
    BadEntry { detail: String },
    #[error("{endpoint} ended the watch: {detail}")]
    WatchEnded { endpoint: String, detail: String },
    #[error("nothing was heard from {endpoint} for {silent_ms} ms")]
    Silent { endpoint: String, silent_ms: u64 },
}

impl EtcdTrouble {
    /// Another attempt will end in the same way.
    pub fn is_for_a_person(&self) -> bool {
        matches!(
            self,
            Self::TlsFile { .. } | Self::NoCa | Self::NotAllowed { .. } | Self::BadEntry { .. }
        )
    }
}

pub(crate) fn trouble(endpoint: &str, call: Call, error: &etcd_client::Error) -> EtcdTrouble {
    let (endpoint, call, detail) = (endpoint.to_owned(), call.name(), detail(error));
    let etcd_client::Error::GRpcStatus(status) = error else {
        return EtcdTrouble::Failed { endpoint, call, detail };
    };
    if is_tls(status) {
        return EtcdTrouble::Tls { endpoint, detail };
    }
    let is_authentication = AUTHENTICATION_WORDS
        .iter()
        .any(|words| status.message().contains(words));
    match status.code() as i32 {
        // tonic's codes are gRPC's: 14 Unavailable; 5 NotFound; 7 PermissionDenied; 16 Unauthenticated.
        14 => EtcdTrouble::Unreachable { endpoint, call, detail },
        5 if status.message().contains("lease not found") => EtcdTrouble::LeaseLost,
        7 | 16 => EtcdTrouble::NotAllowed { endpoint, call, detail },
        _ if is_authentication => EtcdTrouble::NotAllowed { endpoint, call, detail },
        _ => EtcdTrouble::Failed { endpoint, call, detail },
    }
}

/// rustls's errors travel as this kind of I/O error: when connecting, and when reading for a refused client certificate.
fn is_tls(status: &impl std::error::Error) -> bool {
    let mut cause = status.source();
    while let Some(error) = cause {
        let io = error.downcast_ref::<std::io::Error>();
        if io.is_some_and(|error| error.kind() == std::io::ErrorKind::InvalidData) {
            return true;
        }
        cause = error.source();
    }
    false
}

/// The message with its causes, because "transport error" alone helps nobody.
fn detail(error: &etcd_client::Error) -> String {
    use std::error::Error as _;
    let etcd_client::Error::GRpcStatus(status) = error else {
        return shown(&error.to_string());
    };
    let mut words = status.message().to_owned();
    let mut cause = status.source();
    // A chain longer than this only repeats itself.
    for _ in 0..4 {
        let Some(error) = cause else { break };
        words = format!("{words}: {error}");
        cause = error.source();
    }
    shown(&words)
}
