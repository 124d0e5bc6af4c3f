//! API keys: which route wants which scope, what a key's holder may use, and the sign-in of the console.

use std::num::NonZeroU32;

use coordinator::api::{Access, routes};
use coordinator::keys::Keys;
use coordinator::keys::file::{ClientKey, KeyFile, Limits, Scope};
use coordinator::keys::secret::{KeyHash, SecretKey};
use coordinator::request_handle::ClientEvent;
use serde_json::{Value, json};
use serving_core::request::{Lane, Request, RequestError};
use tempfile::TempDir;
use tokio::task::JoinHandle;

use super::client::{Answer, request, send};
use super::harness::{MODEL, Server, until};
use super::script::{Script, Step, placed, say};

/// A server that asks for keys, and its keys.
struct Guarded {
    server: Server,
    /// One for each scope, in the order of `Scope::ALL`.
    secrets: Vec<SecretKey>,
    _folder: TempDir,
}

impl Guarded {
    async fn start(limits: Limits, play: impl Fn(&Request) -> Script + Send + Sync + 'static) -> Self {
        Self::with(|key| key.limits = limits, play).await
    }

    async fn with(change: impl Fn(&mut ClientKey), play: impl Fn(&Request) -> Script + Send + Sync + 'static) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("keys.toml");
        let secrets: Vec<SecretKey> = Scope::ALL.iter().map(|_| SecretKey::random()).collect();
        let entry = |(scope, secret): (Scope, &SecretKey)| {
            let mut key = ClientKey {
                name: scope.name().parse().unwrap(),
                sha256: KeyHash::of(secret.text()),
                scopes: [scope].into(),
                tenant: None,
                lane: None,
                weight: None,
                limits: Limits::default(),
            };
            change(&mut key);
            key
        };
        let keys = Scope::ALL.into_iter().zip(&secrets).map(entry).collect();
        let keys = KeyFile {
            keys,
            ..KeyFile::default()
        };
        keys.save(&file).unwrap();
        let keys = Keys::open(&file, 8000).unwrap();
        let server = Server::start_with(play, |parts| parts.keys = Some(keys)).await;
        Self {
            server,
            secrets,
            _folder: folder,
        }
    }

    async fn saying(limits: Limits, text: &'static str) -> Self {
        Self::start(limits, move |request| Script::Play(say(request, |_| text.to_owned()))).await
    }

    fn bearer(&self, scope: Scope) -> String {
        let place = Scope::ALL.iter().position(|other| *other == scope).unwrap();
        format!("Bearer {}", self.secrets[place].text())
    }

    /// The codes and limits by which requests were refused, in their order.
    fn refused_by(&self) -> Vec<&'static str> {
        self.server.metrics.key_refusals.lock().unwrap().clone()
    }

    async fn ask(&self, method: &str, path: &str, headers: &[(&str, &str)]) -> Answer {
        let body = json!({"model": MODEL, "prompt": "abc"}).to_string();
        let body = if method == "POST" { body.as_bytes() } else { b"" };
        send(self.server.address, &request(method, path, headers, body)).await
    }

    /// A client that waits for the answer to this prompt until it is aborted.
    fn client(&self, prompt: &Value) -> JoinHandle<Answer> {
        let bearer = self.bearer(Scope::Inference);
        let body = json!({"model": MODEL, "prompt": prompt}).to_string();
        let headers = [("authorization", bearer.as_str())];
        let bytes = request("POST", "/v1/completions", &headers, body.as_bytes());
        let address = self.server.address;
        tokio::spawn(async move { send(address, &bytes).await })
    }

    async fn complete(&self) -> Answer {
        let bearer = self.bearer(Scope::Inference);
        self.ask("POST", "/v1/completions", &[("authorization", &bearer)]).await
    }
}

fn code(answer: &Answer) -> String {
    answer.json_or_null()["error"]["code"]
        .as_str()
        .unwrap_or_default()
        .to_owned()
}

fn assert_is(answer: &Answer, (status, wanted): (u16, &str)) {
    assert_eq!(
        (answer.status, code(answer).as_str()),
        (status, wanted),
        "{}",
        answer.text()
    );
}

fn tokens_per_minute(count: u32) -> Limits {
    Limits {
        tokens_per_minute: at_most(count),
        ..Limits::default()
    }
}

fn at_most(count: u32) -> Option<NonZeroU32> {
    NonZeroU32::new(count)
}

#[tokio::test]
async fn every_route_wants_a_key_with_its_scope_and_no_other() {
    let guarded = Guarded::saying(Limits::default(), "x").await;
    let (mut refused, mut let_in) = (0, 0);
    for (path, access, _) in routes() {
        let real = path
            .replace("{role}", "decode")
            .replace("{*", "")
            .replace(['{', '}'], "");
        for method in ["GET", "POST", "DELETE"] {
            let without = guarded.ask(method, &real, &[]).await;
            if without.status == 405 {
                continue;
            }
            if access.is_open() && path != "/session" {
                assert_ne!(code(&without), "missing_api_key", "{method} {path}");
                continue;
            }
            // Its sign-in is for everybody; who asks whose session it is needs one.
            if path == "/session" && method != "GET" {
                continue;
            }
            assert_eq!(
                (without.status, code(&without).as_str()),
                (401, "missing_api_key"),
                "{method} {path}"
            );
            assert_eq!(without.header("www-authenticate"), "Bearer", "{method} {path}");
            for scope in Scope::ALL {
                let is_its = access == Access::Scope(scope);
                let is_for_admins_too = access == Access::Scope(Scope::Metrics) && scope == Scope::Admin;
                let may = access.is_open() || access == Access::AnyKey || is_its || is_for_admins_too;
                // A stream of events has no end.
                if may && path == "/admin/events" {
                    continue;
                }
                let bearer = guarded.bearer(scope);
                let answer = guarded.ask(method, &real, &[("authorization", &bearer)]).await;
                let is_refused = (answer.status, code(&answer).as_str()) == (403, "scope_missing");
                assert_eq!(is_refused, !may, "{method} {path} with {scope}: {}", answer.text());
                assert_ne!(answer.status, 401, "{method} {path} with {scope}");
                *(if may { &mut let_in } else { &mut refused }) += 1;
            }
        }
    }
    assert!(refused > 45 && let_in > 25, "{refused} refused, {let_in} let in");
    assert_eq!(guarded.ask("GET", "/no/such/page", &[]).await.status, 404);
}

#[tokio::test]
async fn what_is_no_key_of_the_file_is_refused() {
    let guarded = Guarded::saying(Limits::default(), "x").await;
    let good = guarded.bearer(Scope::Inference);
    let text = good.strip_prefix("Bearer ").unwrap();
    let other = format!("Bearer {}", SecretKey::random().text());
    for wrong in [
        "",
        "Bearer",
        "Bearer ",
        "Basic eDp5",
        text,
        &other,
        &good[..good.len() - 1],
        &format!("{good}0"),
    ] {
        let answer = guarded.ask("GET", "/v1/models", &[("authorization", wrong)]).await;
        assert_eq!(
            (answer.status, code(&answer).as_str()),
            (401, "invalid_api_key"),
            "{wrong}"
        );
        assert!(!answer.text().contains(text), "{}", answer.text());
    }
    let lower = good.replace("Bearer", "bearer");
    assert_eq!(
        guarded
            .ask("GET", "/v1/models", &[("authorization", &lower)])
            .await
            .status,
        200
    );
    assert_eq!(guarded.complete().await.status, 200);
    assert_eq!(guarded.refused_by(), ["invalid_api_key"; 8]);
    assert_eq!(
        guarded.server.submitted(),
        1,
        "nothing that was refused reached the nodes"
    );
}

#[tokio::test]
async fn a_key_has_as_many_requests_as_its_limit_says() {
    let limits = Limits {
        requests_per_minute: at_most(24),
        ..Limits::default()
    };
    let guarded = Guarded::saying(limits, "x").await;
    let bearer = guarded.bearer(Scope::Inference);
    let first = guarded.complete().await;
    assert_eq!(first.header("x-ratelimit-limit-requests"), "24");
    assert_eq!(first.header("x-ratelimit-remaining-requests"), "1");
    assert_eq!(
        guarded
            .ask("GET", "/v1/models", &[("authorization", &bearer)])
            .await
            .status,
        200
    );
    assert_eq!(
        guarded.complete().await.status,
        200,
        "a list of models is no request that computes"
    );
    let third = guarded.complete().await;
    assert_is(&third, (429, "rate_limit_exceeded"));
    let wait: u32 = third.header("retry-after").parse().unwrap();
    assert!(
        (1..=3).contains(&wait),
        "{wait} s until a 24th of a minute's worth is there"
    );
    assert_eq!(guarded.server.submitted(), 2);
    assert_eq!(guarded.refused_by(), ["requests_per_minute"]);
}

#[tokio::test]
async fn a_key_pays_for_the_tokens_of_prompt_and_answer() {
    let guarded = Guarded::saying(tokens_per_minute(6), "xyz").await;
    assert_eq!(guarded.complete().await.header("x-ratelimit-remaining-tokens"), "1");
    let second = guarded.complete().await;
    assert_is(&second, (429, "rate_limit_exceeded"));
    assert!(second.text().contains("6 tokens a minute"), "{}", second.text());
    assert_eq!(guarded.refused_by(), ["tokens_per_minute"]);
}

#[tokio::test]
async fn a_key_pays_for_a_request_of_which_a_node_had_any_prompt() {
    // The first prompt finds no place.
    let play = |request: &Request| match request.prompt[0].0 == u32::from(b'a') {
        true => Script::Play(vec![Step::Hang]),
        false => Script::Play(vec![placed(), Step::Hang]),
    };
    let guarded = Guarded::start(tokens_per_minute(12), play).await;
    let open = guarded.client(&json!(["a", "b"]));
    until(|| (guarded.server.submitted() == 2).then_some(())).await;
    // The message that the second prompt has its place is on its way to the handler. All tasks run on this thread.
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    open.abort();
    until(|| (guarded.server.heard.lock().unwrap().cancelled.len() == 2).then_some(())).await;
    let bearer = guarded.bearer(Scope::Inference);
    let next = guarded.ask("POST", "/tokenize", &[("authorization", &bearer)]).await;
    assert_is(&next, (429, "rate_limit_exceeded"));
}

#[tokio::test]
async fn an_open_request_takes_a_place_until_its_client_has_left() {
    let limits = Limits {
        concurrent_requests: at_most(1),
        ..Limits::default()
    };
    let guarded = Guarded::start(limits, |_| Script::Play(vec![placed(), Step::Hang])).await;
    let open = guarded.client(&json!("abc"));
    until(|| (guarded.server.submitted() == 1).then_some(())).await;
    let second = guarded.complete().await;
    assert_is(&second, (429, "rate_limit_exceeded"));
    assert_eq!(guarded.refused_by(), ["concurrent_requests"]);
    open.abort();
    until(|| (!guarded.server.heard.lock().unwrap().cancelled.is_empty()).then_some(())).await;
    let bearer = guarded.bearer(Scope::Inference);
    let tokenized = guarded.ask("POST", "/tokenize", &[("authorization", &bearer)]).await;
    assert_eq!(tokenized.status, 200, "{}", tokenized.text());
}

#[tokio::test]
async fn a_key_says_whose_turn_a_request_takes_and_in_which_lane_it_waits() {
    let batch_only = |key: &mut ClientKey| (key.lane, key.weight) = (Some(Lane::Batch), NonZeroU32::new(3));
    let play = |request: &Request| Script::Play(say(request, |_| "x".to_owned()));
    let guarded = Guarded::with(batch_only, play).await;
    assert_eq!(guarded.complete().await.status, 200);
    let request = guarded.server.request();
    let share = request.share.expect("a key was shown");
    assert_eq!((request.lane, share.weight.get()), (Lane::Batch, 3));
    let bearer = guarded.bearer(Scope::Inference);
    let asks = async |lane| {
        let headers = [("authorization", bearer.as_str()), ("x-lane", lane)];
        guarded.ask("POST", "/v1/completions", &headers).await
    };
    assert_eq!(asks("batch").await.status, 200);
    assert_is(&asks("interactive").await, (403, "lane_missing"));
}

#[tokio::test]
async fn the_console_signs_in_with_a_key_and_out_again() {
    let guarded = Guarded::saying(Limits::default(), "x").await;
    let sign_in = async |key: String| {
        let body = json!({"key": key}).to_string();
        let bytes = request("POST", "/session", &[], body.as_bytes());
        send(guarded.server.address, &bytes).await
    };
    let admin = guarded.bearer(Scope::Admin);
    let key = admin.strip_prefix("Bearer ").unwrap();
    let signed_in = sign_in(key.to_owned()).await;
    assert_eq!(
        signed_in.json(),
        json!({"asks_for_keys": true, "key": "admin", "scopes": ["admin"]})
    );
    let set = signed_in.header("set-cookie").to_owned();
    for part in ["HttpOnly", "SameSite=Strict", "Path=/"] {
        assert!(set.contains(part), "{set}");
    }
    assert!(!set.contains(key), "the cookie is not the key");
    let cookie = format!("theme=dark; {}", set.split(';').next().unwrap());
    let with_cookie = [("cookie", cookie.as_str())];
    assert_eq!(guarded.ask("GET", "/admin/cluster", &with_cookie).await.status, 200);
    let lacks = guarded.ask("GET", "/v1/models", &with_cookie).await;
    assert_is(&lacks, (403, "scope_missing"));
    assert_eq!(
        guarded.ask("GET", "/session", &with_cookie).await.json()["key"],
        "admin"
    );
    assert_eq!(guarded.ask("DELETE", "/session", &with_cookie).await.status, 204);
    let over = guarded.ask("GET", "/admin/cluster", &with_cookie).await;
    assert_is(&over, (401, "session_ended"));

    assert_eq!(code(&sign_in("baton-0".to_owned()).await), "invalid_api_key");
    let bytes = request("POST", "/session", &[], b"[]");
    assert_eq!(send(guarded.server.address, &bytes).await.status, 400);
    let large = json!({"key": "x".repeat(5_000)}).to_string();
    let bytes = request("POST", "/session", &[], large.as_bytes());
    assert_eq!(send(guarded.server.address, &bytes).await.status, 400);
    assert_eq!(
        guarded.refused_by(),
        ["scope_missing", "session_ended", "invalid_api_key"]
    );
}

#[tokio::test]
async fn a_clients_error_names_no_node_and_an_operators_does() {
    let fails = |_: &Request| {
        let error = RequestError::DecodeNodeFailed {
            node: "decode-7".into(),
            detail: "10.0.0.7:7420 is gone".into(),
        };
        Script::Play(vec![placed(), Step::Event(ClientEvent::Failed(error))])
    };
    let guarded = Guarded::start(Limits::default(), fails).await;
    let open = Server::start(fails).await;
    for is_streaming in [false, true] {
        let body = json!({"model": MODEL, "prompt": "abc", "stream": is_streaming}).to_string();
        let bearer = guarded.bearer(Scope::Inference);
        let bytes = request(
            "POST",
            "/v1/completions",
            &[("authorization", &bearer)],
            body.as_bytes(),
        );
        let text = send(guarded.server.address, &bytes).await.text();
        assert!(text.contains("A node failed. Send the request again."), "{text}");
        assert!(!text.contains("decode-7") && !text.contains("10.0.0.7"), "{text}");
        let bytes = request("POST", "/v1/completions", &[], body.as_bytes());
        let text = send(open.address, &bytes).await.text();
        assert!(text.contains("decode-7"), "{text}");
    }
}

#[tokio::test]
async fn what_a_client_reads_names_no_node() {
    let play = |request: &Request| Script::Play(say(request, |_| "x".to_owned()));
    let guarded = Guarded::start(Limits::default(), play).await;
    let open = Server::start(play).await;
    let bearer = guarded.bearer(Scope::Inference);
    let body = json!({"model": MODEL, "prompt": "abc", "include_metrics": true}).to_string();
    for (address, is_client) in [(guarded.server.address, true), (open.address, false)] {
        let headers = [("authorization", bearer.as_str())];
        let asked = request("POST", "/v1/completions", &headers, body.as_bytes());
        let metrics = send(address, &asked).await.json()["metrics"].take();
        assert!(metrics["output_tokens"].is_u64(), "{metrics}");
        for name in ["prefill_node", "decode_node", "route_reason"] {
            assert_eq!(metrics[name].is_null(), is_client, "{name}: {metrics}");
        }
        let ready = send(address, &request("GET", "/ready", &[], b"")).await.json();
        assert_eq!(ready["suspected_nodes"].is_null(), is_client, "{ready}");
    }
}

#[tokio::test]
async fn a_request_is_salted_by_its_tenant_and_its_own_salt_and_counted_for_its_tenant() {
    let server = Server::saying("x").await;
    let salt_of = async |server: &Server, headers: &[(&str, &str)], body: serde_json::Value| {
        let bytes = request("POST", "/v1/completions", headers, body.to_string().as_bytes());
        let answer = send(server.address, &bytes).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let request = server.request();
        (request.prefix_salt, request.cache_tenant)
    };
    let plain = json!({"model": MODEL, "prompt": "abc"});
    let salted = json!({"model": MODEL, "prompt": "abc", "cache_salt": "s"});
    assert_eq!(salt_of(&server, &[], plain.clone()).await, (None, None));
    let (of_salt, tenant) = salt_of(&server, &[], salted.clone()).await;
    assert!(of_salt.is_some() && tenant.is_none());

    let guarded = Guarded::saying(Limits::default(), "x").await;
    let bearer = guarded.bearer(Scope::Inference);
    let headers = [("authorization", bearer.as_str())];
    let (of_tenant, tenant) = salt_of(&guarded.server, &headers, plain.clone()).await;
    let (of_both, same_tenant) = salt_of(&guarded.server, &headers, salted).await;
    assert!(of_tenant.is_some() && of_both.is_some());
    assert!(
        tenant.is_some() && tenant == same_tenant,
        "a salt is no way to another share of the caches"
    );
    assert!(of_tenant != of_both && of_tenant != of_salt && of_both != of_salt);
    assert_eq!(
        salt_of(&guarded.server, &headers, plain).await,
        (of_tenant, tenant),
        "always the same"
    );

    let empty = json!({"model": MODEL, "prompt": "abc", "cache_salt": ""}).to_string();
    let bytes = request("POST", "/v1/completions", &[], empty.as_bytes());
    let answer = send(server.address, &bytes).await;
    assert_eq!(
        (answer.status, &answer.json()["error"]["param"]),
        (400, &json!("cache_salt"))
    );
}

#[tokio::test]
async fn without_a_file_of_keys_nobody_is_asked() {
    let server = Server::saying("x").await;
    let bytes = request("GET", "/session", &[], b"");
    assert_eq!(
        send(server.address, &bytes).await.json(),
        json!({"asks_for_keys": false})
    );
    let bytes = request("GET", "/admin/requests", &[("authorization", "Bearer whatever")], b"");
    assert_eq!(
        send(server.address, &bytes).await.status,
        200,
        "OpenAI's clients always send a key"
    );
}
