//! One connection to one etcd endpoint. Every call has a time limit, every failure has a type, and no answer can cause a
//! panic.
//!
//! When a call fails, the connection is dropped and the next one goes to the next endpoint. (A balanced channel over all
//! endpoints would send every other call to the dead one.)
//!
//! The keep-alive of a lost lease answers `ttl` 0 and no error.

use std::path::Path;
use std::pin::Pin;
use std::time::Duration;

use tonic::Status;
use tonic::transport::{Certificate, ClientTlsConfig, Identity};

use crate::address::EtcdAddress;
use crate::client::{Client, ClientOptions, Watch};
use crate::messages::{
    Compare, CompareTarget, KeyValue, PutRequest, RangeRequest, RequestOp, TxnRequest, WatchCreateRequest,
};
use crate::trouble::{Call, EtcdTrouble, trouble};

/// A page of a list. With the largest value that etcd takes by default (1.5 MiB) it stays below the message limit, so that
/// no record that somebody puts by hand can make the list fail.
const PAGE_KEYS: i64 = 32;
/// The limit for a TLS file. A chain of certificates has a few KiB.
const TLS_FILE_BYTES_MAX: u64 = 1 << 20;

/// A lease as etcd granted it. Its TTL may be longer than the one that was asked for (at least 2 s by default).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lease {
    pub id: i64,
    pub ttl: Duration,
}

/// One key and its record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KeyRecord {
    pub key: Vec<u8>,
    pub value: Vec<u8>,
    pub mod_revision: i64,
    pub lease: i64,
}

/// All records of a folder as of one revision.
#[derive(Clone, Debug)]
pub(crate) struct FolderList {
    pub revision: i64,
    pub records: Vec<KeyRecord>,
    /// There are more records, which were not read.
    pub is_cut: bool,
}

/// A guarded write.
#[derive(Debug)]
pub(crate) struct GuardedPut<'a> {
    pub key: &'a str,
    pub value: Vec<u8>,
    pub lease: i64,
    /// The revision that must still be there. `None`: the key must be empty.
    pub expected: Option<i64>,
}

/// A boxed call. It is compiled here, once. Registrations and directories are generic, so whatever they wait for unboxed
/// would be compiled again in every crate that uses one.
pub(crate) type Answer<'a, T> = Pin<Box<dyn Future<Output = Result<T, EtcdTrouble>> + Send + 'a>>;

#[derive(Clone)]
pub(crate) struct Connection {
    client: Client,
    endpoint: String,
    call_limit: Duration,
}

impl Connection {
    pub(crate) fn open<'a>(address: &'a EtcdAddress, endpoint_index: usize, call_limit: Duration) -> Answer<'a, Self> {
        Box::pin(async move {
            let endpoint = address.endpoint_url(endpoint_index);
            let connecting = Client::open(ClientOptions {
                url: &endpoint,
                call_limit,
                tls: tls_config(address).await?,
                credentials: address.credentials.clone(),
            });
            let client = timed(connecting, &endpoint, Call::Connect, call_limit).await?;
            Ok(Self {
                client,
                endpoint,
                call_limit,
            })
        })
    }

    pub(crate) fn endpoint(&self) -> &str {
        &self.endpoint
    }

    pub(crate) fn grant(&self, ttl: Duration) -> Answer<'_, Lease> {
        Box::pin(async move {
            // Whole seconds, rounded up, because a TTL below the one that was asked for would lose leases.
            let seconds = i64::try_from(ttl.as_millis().div_ceil(1000)).unwrap_or(i64::MAX).max(1);
            let granted = self.timed(self.client.lease_grant(seconds), Call::GrantLease).await?;
            match u64::try_from(granted.ttl) {
                Ok(seconds) if seconds > 0 => Ok(Lease {
                    id: granted.id,
                    ttl: Duration::from_secs(seconds),
                }),
                _ => Err(EtcdTrouble::LeaseLost),
            }
        })
    }

    /// `false`: etcd no longer has the lease.
    pub(crate) fn keep_alive(&self, lease: i64) -> Answer<'_, bool> {
        Box::pin(async move {
            let renewed = self.timed(self.client.lease_keep_alive(lease), Call::KeepLease).await?;
            Ok(renewed.ttl > 0)
        })
    }

    pub(crate) fn revoke(&self, lease: i64) -> Answer<'_, ()> {
        Box::pin(async move { self.timed(self.client.lease_revoke(lease), Call::RevokeLease).await })
    }

    pub(crate) fn read<'a>(&'a self, key: &'a str) -> Answer<'a, Option<KeyRecord>> {
        Box::pin(async move {
            let request = RangeRequest {
                key: key.into(),
                ..RangeRequest::default()
            };
            let answer = self.timed(self.client.range(request), Call::Read).await?;
            Ok(answer.kvs.into_iter().next().map(KeyRecord::of))
        })
    }

    /// `None`: another process has written there meanwhile.
    pub(crate) fn put<'a>(&'a self, put: GuardedPut<'a>) -> Answer<'a, Option<i64>> {
        Box::pin(async move {
            let (target, create_revision) = match put.expected {
                Some(_) => (CompareTarget::ModRevision, None),
                None => (CompareTarget::CreateRevision, Some(0)),
            };
            let guard = Compare {
                target: target.into(),
                key: put.key.into(),
                create_revision,
                mod_revision: put.expected,
            };
            let write = PutRequest {
                key: put.key.into(),
                value: put.value,
                lease: put.lease,
            };
            let request = TxnRequest {
                compare: vec![guard],
                success: vec![RequestOp {
                    request_put: Some(write),
                }],
            };
            let done = self.timed(self.client.txn(request), Call::Write).await?;
            match (done.succeeded, done.header) {
                (true, Some(header)) => Ok(Some(header.revision)),
                (true, None) => Err(self.failed(Call::Write, "the answer has no revision")),
                (false, _) => Ok(None),
            }
        })
    }

    /// Reads in pages, all as of the first page's revision, and at most `keys_max` records.
    pub(crate) fn list<'a>(&'a self, prefix: &'a str, keys_max: usize) -> Answer<'a, FolderList> {
        Box::pin(async move {
            let end = prefix_end(prefix);
            let mut from = prefix.as_bytes().to_vec();
            let (mut revision, mut records) = (0, Vec::new());
            loop {
                let request = RangeRequest {
                    key: from,
                    range_end: end.clone(),
                    limit: PAGE_KEYS,
                    revision,
                };
                let page = self.timed(self.client.range(request), Call::List).await?;
                if revision == 0 {
                    let header = page.header;
                    revision = header
                        .ok_or_else(|| self.failed(Call::List, "the answer has no revision"))?
                        .revision;
                }
                let last_key = page.kvs.last().map(|last| last.key.clone());
                records.extend(page.kvs.into_iter().map(KeyRecord::of));
                let Some(last_key) = last_key.filter(|_| page.more && records.len() < keys_max) else {
                    let is_cut = page.more || records.len() > keys_max;
                    records.truncate(keys_max);
                    return Ok(FolderList {
                        revision,
                        records,
                        is_cut,
                    });
                };
                // The smallest key after the last one.
                from = [last_key.as_slice(), b"\0"].concat();
            }
        })
    }

    pub(crate) fn watch<'a>(&'a self, prefix: &'a str, from_revision: i64) -> Answer<'a, Watch> {
        Box::pin(async move {
            let request = WatchCreateRequest {
                key: prefix.into(),
                range_end: prefix_end(prefix),
                start_revision: from_revision,
                fragment: true,
            };
            self.timed(self.client.watch(request), Call::Watch).await
        })
    }

    pub(crate) fn trouble(&self, call: Call, error: &Status) -> EtcdTrouble {
        trouble(&self.endpoint, call, error)
    }

    fn failed(&self, call: Call, detail: &str) -> EtcdTrouble {
        EtcdTrouble::Failed {
            endpoint: self.endpoint.clone(),
            call: call.name(),
            detail: detail.to_owned(),
        }
    }

    async fn timed<T>(&self, work: impl Future<Output = Result<T, Status>>, call: Call) -> Result<T, EtcdTrouble> {
        timed(work, &self.endpoint, call, self.call_limit).await
    }
}

impl KeyRecord {
    pub(crate) fn of(kv: KeyValue) -> Self {
        Self {
            key: kv.key,
            value: kv.value,
            mod_revision: kv.mod_revision,
            lease: kv.lease,
        }
    }
}

/// The first key behind all keys with the prefix. Our prefixes end in `/`, so there always is one.
fn prefix_end(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        *last = last.saturating_add(1);
    }
    end
}

/// The client's own time limit covers only the head of an answer, so this limit is around the whole call.
async fn timed<T>(
    work: impl Future<Output = Result<T, Status>>,
    endpoint: &str,
    call: Call,
    limit: Duration,
) -> Result<T, EtcdTrouble> {
    match tokio::time::timeout(limit, work).await {
        Ok(done) => done.map_err(|error| trouble(endpoint, call, &error)),
        Err(_) => Err(EtcdTrouble::TimedOut {
            endpoint: endpoint.to_owned(),
            call: call.name(),
            limit_ms: u64::try_from(limit.as_millis()).unwrap_or(u64::MAX),
        }),
    }
}

async fn tls_config(address: &EtcdAddress) -> Result<Option<ClientTlsConfig>, EtcdTrouble> {
    let Some(files) = &address.tls else {
        return Ok(None);
    };
    let mut tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(tls_file(&files.ca).await?));
    if let Some(identity) = &files.identity {
        let (certificate, key) = (tls_file(&identity.certificate).await?, tls_file(&identity.key).await?);
        tls = tls.identity(Identity::from_pem(certificate, key));
    }
    Ok(Some(tls))
}

async fn tls_file(path: &Path) -> Result<Vec<u8>, EtcdTrouble> {
    use tokio::io::AsyncReadExt as _;
    let unreadable = |detail: String| EtcdTrouble::TlsFile {
        path: path.display().to_string(),
        detail,
    };
    let file = tokio::fs::File::open(path)
        .await
        .map_err(|error| unreadable(error.to_string()))?;
    let mut bytes = Vec::new();
    let mut limited = file.take(TLS_FILE_BYTES_MAX + 1);
    limited
        .read_to_end(&mut bytes)
        .await
        .map_err(|error| unreadable(error.to_string()))?;
    if bytes.len() as u64 > TLS_FILE_BYTES_MAX {
        return Err(unreadable(
            "larger than 1 MiB, which is no certificate or key".to_owned(),
        ));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_tls_file_that_is_not_there_is_named() {
        let address: EtcdAddress = "etcds://h:1/c?ca=/nonexistent/ca.pem".parse().expect("address");
        let trouble = Connection::open(&address, 0, Duration::from_secs(1))
            .await
            .err()
            .expect("trouble");
        assert!(trouble.is_for_a_person(), "{trouble}");
        assert!(matches!(trouble, EtcdTrouble::TlsFile { path, .. } if path == "/nonexistent/ca.pem"));
    }

    #[test]
    fn the_end_of_a_prefix_is_behind_all_its_keys() {
        assert_eq!(prefix_end("/baton/c/nodes/"), b"/baton/c/nodes0");
    }
}
