//! One connection to one etcd endpoint. Every call has a time limit, every failure has a type, and no answer can cause a
//! panic.
//!
//! When a call fails, the connection is dropped and the next one goes to the next endpoint. (A balanced channel over all
//! endpoints would send every other call to the dead one.)
//!
//! Traps of etcd-client that this file avoids: `Event::event_type` panics on a type that it does not know, and
//! `TxnResponse::op_responses` unwraps, so neither is called; `connect` succeeds when nothing listens; the keep-alive of a
//! lost lease answers `ttl 0` and no error; etcd closes a connection that pings more often than every 5 s.

use std::path::Path;
use std::time::Duration;

use etcd_client::{
    Certificate, Client, Compare, CompareOp, ConnectOptions, GetOptions, Identity, PutOptions, TlsOptions, Txn, TxnOp,
    WatchOptions, WatchStream,
};

use crate::address::EtcdAddress;
use crate::entry::RECORD_BYTES_MAX;
use crate::trouble::{Call, EtcdTrouble, trouble};

/// etcd closes connections that ping more often than its `--grpc-keepalive-min-time`, which is 5 s by default. This is
/// twice that.
const PING_INTERVAL: Duration = Duration::from_secs(10);
/// A page of a list. With the largest value that etcd takes by default (1.5 MiB) it stays below the message limit, so that
/// no record that somebody puts by hand can make the list fail.
const PAGE_KEYS: i64 = 32;
/// The limit for answers to lists and for watch messages, which etcd splits (`fragment`) at about 2 MiB.
const MESSAGE_BYTES_MAX: usize = 64 << 20;
/// The limit for a TLS file. A chain of certificates has a few KiB.
const TLS_FILE_BYTES_MAX: u64 = 1 << 20;
/// A key of ours is shorter: the folder of a cluster, whose name has at most 63 bytes, and a node's name of at most 255.
const KEY_BYTES_MAX: usize = 1 << 10;

/// A lease as etcd granted it. Its TTL may be longer than the one that was asked for (at least 2 s by default).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lease {
    pub id: i64,
    pub ttl: Duration,
}

/// One key and its record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KeyRecord {
    /// At most one byte more than a key of ours may have, like the value.
    pub key: Vec<u8>,
    /// At most one byte more than a record may have: such a value is too large, however long it is in etcd.
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

#[derive(Clone)]
pub(crate) struct Connection {
    client: Client,
    endpoint: String,
    call_limit: Duration,
}

impl Connection {
    pub(crate) async fn open(
        address: &EtcdAddress,
        endpoint_index: usize,
        call_limit: Duration,
    ) -> Result<Self, EtcdTrouble> {
        let endpoint = address.endpoint_url(endpoint_index);
        let options = connect_options(address, call_limit).await?;
        let connecting = Client::connect([&endpoint], Some(options));
        let client = timed(connecting, &endpoint, Call::Connect, call_limit).await?;
        Ok(Self {
            client,
            endpoint,
            call_limit,
        })
    }

    pub(crate) fn endpoint(&self) -> &str {
        &self.endpoint
    }

    pub(crate) async fn grant(&self, ttl: Duration) -> Result<Lease, EtcdTrouble> {
        // Whole seconds, rounded up, because a TTL below the one that was asked for would lose leases.
        let seconds = i64::try_from(ttl.as_millis().div_ceil(1000)).unwrap_or(i64::MAX).max(1);
        let mut client = self.client.lease_client();
        let granted = self.timed(client.grant(seconds, None), Call::GrantLease).await?;
        match u64::try_from(granted.ttl()) {
            Ok(seconds) if seconds > 0 => Ok(Lease {
                id: granted.id(),
                ttl: Duration::from_secs(seconds),
            }),
            _ => Err(EtcdTrouble::LeaseLost),
        }
    }

    /// `false`: etcd no longer has the lease.
    pub(crate) async fn keep_alive(&self, lease: i64) -> Result<bool, EtcdTrouble> {
        let mut client = self.client.lease_client();
        // One question on a stream of its own, so there is no stream that could break between two renewals.
        let renewing = async {
            match client.keep_alive(lease).await {
                Ok(_) => Ok(true),
                // The client reports `ttl <= 0` like this.
                Err(etcd_client::Error::LeaseKeepAliveError(_)) => Ok(false),
                Err(error) => Err(error),
            }
        };
        self.timed(renewing, Call::KeepLease).await
    }

    pub(crate) async fn revoke(&self, lease: i64) -> Result<(), EtcdTrouble> {
        let mut client = self.client.lease_client();
        self.timed(client.revoke(lease), Call::RevokeLease).await.map(|_| ())
    }

    pub(crate) async fn read(&self, key: &str) -> Result<Option<KeyRecord>, EtcdTrouble> {
        let mut client = self.client.kv_client().max_decoding_message_size(MESSAGE_BYTES_MAX);
        let answer = self.timed(client.get(key, None), Call::Read).await?;
        Ok(answer.kvs().first().map(KeyRecord::of))
    }

    /// `None`: another process has written there meanwhile.
    pub(crate) async fn put(&self, put: GuardedPut<'_>) -> Result<Option<i64>, EtcdTrouble> {
        let guard = match put.expected {
            Some(revision) => Compare::mod_revision(put.key, CompareOp::Equal, revision),
            None => Compare::create_revision(put.key, CompareOp::Equal, 0),
        };
        let options = PutOptions::new().with_lease(put.lease);
        let write = TxnOp::put(put.key, put.value, Some(options));
        let mut client = self.client.kv_client();
        let done = self
            .timed(client.txn(Txn::new().when([guard]).and_then([write])), Call::Write)
            .await?;
        let revision = done.header().map(etcd_client::ResponseHeader::revision);
        match (done.succeeded(), revision) {
            (true, Some(revision)) => Ok(Some(revision)),
            (true, None) => Err(self.failed(Call::Write, "the answer has no revision")),
            (false, _) => Ok(None),
        }
    }

    /// Reads in pages, all as of the first page's revision, and at most `keys_max` records.
    pub(crate) async fn list(&self, prefix: &str, keys_max: usize) -> Result<FolderList, EtcdTrouble> {
        let end = prefix_end(prefix);
        let mut from = prefix.as_bytes().to_vec();
        let (mut revision, mut records) = (0, Vec::new());
        loop {
            let options = GetOptions::new()
                .with_range(end.clone())
                .with_limit(PAGE_KEYS)
                .with_revision(revision);
            let mut client = self.client.kv_client().max_decoding_message_size(MESSAGE_BYTES_MAX);
            let page = self.timed(client.get(from, Some(options)), Call::List).await?;
            if revision == 0 {
                let header = page
                    .header()
                    .ok_or_else(|| self.failed(Call::List, "the answer has no revision"))?;
                revision = header.revision();
            }
            records.extend(page.kvs().iter().map(KeyRecord::of));
            let Some(last) = page.kvs().last().filter(|_| page.more() && records.len() < keys_max) else {
                let is_cut = page.more() || records.len() > keys_max;
                records.truncate(keys_max);
                return Ok(FolderList {
                    revision,
                    records,
                    is_cut,
                });
            };
            // The smallest key after the last one.
            from = [last.key(), b"\0"].concat();
        }
    }

    pub(crate) async fn watch(&self, prefix: &str, from_revision: i64) -> Result<WatchStream, EtcdTrouble> {
        let options = WatchOptions::new()
            .with_prefix()
            .with_start_revision(from_revision)
            .with_fragment();
        let mut client = self.client.watch_client().max_decoding_message_size(MESSAGE_BYTES_MAX);
        self.timed(client.watch(prefix, Some(options)), Call::Watch).await
    }

    pub(crate) fn trouble(&self, call: Call, error: &etcd_client::Error) -> EtcdTrouble {
        trouble(&self.endpoint, call, error)
    }

    fn failed(&self, call: Call, detail: &str) -> EtcdTrouble {
        EtcdTrouble::Failed {
            endpoint: self.endpoint.clone(),
            call: call.name(),
            detail: detail.to_owned(),
        }
    }

    async fn timed<T>(
        &self,
        work: impl Future<Output = Result<T, etcd_client::Error>>,
        call: Call,
    ) -> Result<T, EtcdTrouble> {
        timed(work, &self.endpoint, call, self.call_limit).await
    }
}

impl KeyRecord {
    pub(crate) fn of(kv: &etcd_client::KeyValue) -> Self {
        Self {
            key: kept_of_key(kv.key()).to_vec(),
            value: kept_of(kv.value()).to_vec(),
            mod_revision: kv.mod_revision(),
            lease: kv.lease(),
        }
    }
}

/// The part of a value that is kept. A list of values as long as etcd takes them would have gigabytes. One byte more than a record may
/// have shows that the value is no record.
fn kept_of(value: &[u8]) -> &[u8] {
    value.get(..=RECORD_BYTES_MAX).unwrap_or(value)
}

/// The same for a key, which may be as long as a value in etcd. What is kept of a key that is too long is longer than any key of ours, so it
/// names no node.
pub(crate) fn kept_of_key(key: &[u8]) -> &[u8] {
    key.get(..=KEY_BYTES_MAX).unwrap_or(key)
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
    work: impl Future<Output = Result<T, etcd_client::Error>>,
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

async fn connect_options(address: &EtcdAddress, call_limit: Duration) -> Result<ConnectOptions, EtcdTrouble> {
    let mut options = ConnectOptions::new()
        .with_timeout(call_limit)
        .with_connect_timeout(call_limit)
        .with_keep_alive(PING_INTERVAL, call_limit)
        // etcd also takes pings without an open stream for an attack.
        .with_keep_alive_while_idle(false)
        // A member that is cut off from its cluster then ends its watches instead of staying silent.
        .with_require_leader(true)
        .with_auto_token_refresh(true);
    if let Some(credentials) = &address.credentials {
        options = options.with_user(&credentials.user, &credentials.password);
    }
    if let Some(files) = &address.tls {
        let ca = files.ca.as_deref().ok_or(EtcdTrouble::NoCa)?;
        let mut tls = TlsOptions::new().ca_certificate(Certificate::from_pem(tls_file(ca).await?));
        if let Some(identity) = &files.identity {
            let (certificate, key) = (tls_file(&identity.certificate).await?, tls_file(&identity.key).await?);
            tls = tls.identity(Identity::from_pem(certificate, key));
        }
        options = options.with_tls(tls);
    }
    Ok(options)
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
    use crate::entry::{BadRecord, CoordinatorEntry, Entry as _, epoch_of};

    #[test]
    fn of_a_value_that_is_too_large_only_so_much_is_kept_as_shows_it() {
        let huge = vec![b' '; 20 * RECORD_BYTES_MAX];
        let kept = kept_of(&huge);
        assert_eq!(kept.len(), RECORD_BYTES_MAX + 1);
        assert_eq!(CoordinatorEntry::decode(kept), Err(BadRecord::TooLarge));
        assert_eq!(epoch_of(kept), None);
        for whole in [&huge[..RECORD_BYTES_MAX], &[]] {
            assert_eq!(kept_of(whole), whole);
        }
        assert_eq!(kept_of_key(&huge).len(), KEY_BYTES_MAX + 1);
        assert_eq!(kept_of_key(&huge[..KEY_BYTES_MAX]).len(), KEY_BYTES_MAX);
    }

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
