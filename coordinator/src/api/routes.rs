//! Every route of the HTTP surface, with what a caller needs for it where keys are asked for.

use std::sync::Arc;

use axum::response::Redirect;
use axum::routing::{MethodRouter, get, post};

use super::access::Access;
use super::{
    AppState, admin, cache, console, events, generate, info, models, nodes, openapi, probes, rates, reports, session,
    tokenize, traces,
};
use crate::keys::file::Scope;

pub type Route = (&'static str, Access, MethodRouter<Arc<AppState>>);

/// A route cannot be added without saying who may use it.
pub fn routes() -> Vec<Route> {
    let parts = [open(), inference(), operation()];
    parts.into_iter().flatten().collect()
}

/// What needs no key, and what any key may see.
fn open() -> Vec<Route> {
    let (probe, console) = (Access::Probe, Access::Console);
    vec![
        ("/health", probe, get(probes::health)),
        ("/ready", probe, get(probes::ready)),
        ("/ping", probe, get(probes::health).post(probes::health)),
        ("/", console, get(|| async { Redirect::to("/ui") })),
        ("/ui", console, get(console::index)),
        ("/ui/{*path}", console, get(console::file)),
        (
            "/session",
            console,
            get(session::whose).post(session::begin).delete(session::end),
        ),
        ("/version", Access::AnyKey, get(probes::version)),
        ("/openapi.json", Access::AnyKey, get(openapi::document)),
    ]
}

fn inference() -> Vec<Route> {
    let inference = Access::Scope(Scope::Inference);
    vec![
        ("/v1/models", inference, get(models::list)),
        ("/v1/models/{*id}", inference, get(models::one)),
        ("/v1/completions", inference, post(generate::completions)),
        ("/v1/chat/completions", inference, post(generate::chat_completions)),
        ("/v1/responses", inference, post(generate::responses)),
        ("/tokenize", inference, post(tokenize::tokenize)),
        ("/detokenize", inference, post(tokenize::detokenize)),
        ("/tokenizer_info", inference, get(tokenize::tokenizer_info)),
    ]
}

fn operation() -> Vec<Route> {
    let (admin, metrics) = (Access::Scope(Scope::Admin), Access::Scope(Scope::Metrics));
    vec![
        ("/metrics", metrics, get(probes::metrics)),
        ("/load", metrics, get(info::load)),
        ("/server_info", admin, get(info::server_info)),
        ("/get_server_info", admin, get(info::server_info)),
        ("/admin/requests", admin, get(admin::requests)),
        ("/admin/requests/{id}", admin, get(admin::request)),
        ("/admin/traces/{id}", admin, get(traces::trace)),
        ("/admin/cluster", admin, get(admin::cluster)),
        ("/admin/nodes/{name}/drain", admin, post(nodes::drain)),
        ("/admin/nodes/{name}/role/{role}", admin, post(nodes::change_role)),
        ("/admin/reset_prefix_cache", admin, post(cache::reset)),
        ("/reset_prefix_cache", admin, post(cache::reset)),
        ("/flush_cache", admin, post(cache::reset)),
        ("/admin/slo", admin, get(admin::slo)),
        ("/admin/rates", admin, get(rates::rates)),
        ("/admin/events", admin, get(events::events)),
        ("/admin/reports", admin, get(reports::list)),
        ("/admin/reports/{name}", admin, get(reports::one)),
    ]
}
