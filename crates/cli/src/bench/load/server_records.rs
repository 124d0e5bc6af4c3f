//! What a coordinator of baton tells of the run's requests (docs/reference/records.md). Other servers have no such page.

use std::collections::BTreeMap;

use coordinator::records::Page;
use coordinator::records::shape::{Detail, Serving};
use futures::StreamExt as _;
use serde::de::DeserializeOwned;
use workload::record::{RequestRecord, ServerRecord};

use super::plan::Server;
use crate::http::TrustArgs;
use crate::observe::UrlArgs;
use crate::observe::client::AdminClient;

const PAGE: usize = 1000;
/// A coordinator keeps 10,000 records unless it is told otherwise.
const PAGES_MAX: usize = 100;
/// The stages of a request are on a page of their own. With more requests than this only the list is read.
const DETAILS_MAX: usize = 5_000;
const DETAILS_AT_ONCE: usize = 8;

/// Adds to each record what the server says of it. A server that says nothing changes nothing.
pub(super) async fn add(server: &Server, records: &mut [RequestRecord]) {
    let named = UrlArgs {
        trust: TrustArgs::new(server.ca.clone()),
        ..UrlArgs::of(&server.url)
    };
    let Ok(client) = AdminClient::of_server(&named, server.api_key.as_deref()) else {
        return;
    };
    let wanted: BTreeMap<String, usize> = records
        .iter()
        .enumerate()
        .map(|(at, record)| (record.id.clone(), at))
        .collect();
    let mut found = Vec::new();
    let mut before: Option<u64> = None;
    for _ in 0..PAGES_MAX {
        let mut query = vec![("limit", PAGE.to_string())];
        query.extend(before.map(|before| ("before", before.to_string())));
        let Some(page) = read::<Page>(&client, &["admin", "requests"], &query).await else {
            break;
        };
        for summary in &page.records {
            if let Some(at) = wanted.get(&summary.id) {
                records[*at].server = Some(server_record(&summary.serving));
                found.push(*at);
            }
        }
        before = page.next_before;
        if before.is_none() || found.len() >= wanted.len() {
            break;
        }
    }
    if found.len() > DETAILS_MAX {
        return;
    }
    let details = found.into_iter().map(|at| {
        let (client, id) = (&client, records[at].id.clone());
        async move { (at, read::<Detail>(client, &["admin", "requests", &id], &[]).await) }
    });
    let details: Vec<(usize, Option<Detail>)> = futures::stream::iter(details.collect::<Vec<_>>())
        .buffer_unordered(DETAILS_AT_ONCE)
        .collect()
        .await;
    for (at, detail) in details {
        if let (Some(detail), Some(server)) = (detail, &mut records[at].server) {
            let stages = detail.stages.into_iter();
            server.stages = stages.map(|stage| (stage.stage.into_owned(), stage.ms)).collect();
        }
    }
}

/// `None` for anything but a page of a coordinator: the run is whole without it.
async fn read<T: DeserializeOwned>(client: &AdminClient, path: &[&str], query: &[(&'static str, String)]) -> Option<T> {
    let page = client.find(path, query).await.ok()??;
    crate::observe::client::parse(path, &page).ok()
}

/// What a coordinator says of a request in its list. The stages are on the request's own page.
pub(crate) fn server_record(serving: &Serving) -> ServerRecord {
    ServerRecord {
        prefill_node: serving.prefill_node.clone(),
        decode_node: serving.decode_node.clone(),
        local_prefill: serving.local_prefill.as_ref().map(|reason| reason.to_string()),
        kv_bytes: serving.transport.is_some().then_some(serving.kv_bytes),
        kv_transfer_ms: serving.kv_transfer_ms,
        stages: Vec::new(),
    }
}
