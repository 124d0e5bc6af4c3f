//! Requests that browsers, programs and attackers send, and what the guard says to each.

use super::*;

fn guard(allowed: &[&str]) -> HttpGuard {
    let allowed_hosts = allowed.iter().map(|name| name.parse().expect("a pattern")).collect();
    HttpGuard::new(&GuardConfig { allowed_hosts }, &["decode-0:7420", "0.0.0.0:7420"])
}

fn head(method: &str, uri: &str, headers: &[(&str, &str)]) -> request::Parts {
    let mut request = http::Request::builder().method(method).uri(uri);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(()).expect("a request").into_parts().0
}

fn code(guard: &HttpGuard, head: &request::Parts) -> Option<&'static str> {
    guard.check(head).err().map(|refusal| refusal.code)
}

#[test]
fn addresses_localhost_and_chosen_names_are_answered_and_no_other() {
    let guard = guard(&["Baton.example.com", "*.svc.cluster.local"]);
    let of = |host: &str| code(&guard, &head("GET", "/admin/cluster", &[("host", host)]));
    for known in [
        "127.0.0.1:8000",
        "10.1.2.3",
        "[::1]:8000",
        "[fe80::1]",
        "localhost",
        "LOCALHOST:80",
        "localhost.:80",
        "baton.example.com:1",
        "baton.example.com.",
        "baton.ns.svc.cluster.local",
        "decode-0:7420",
    ] {
        assert_eq!(of(known), None, "{known}");
    }
    for strange in [
        "rebound.test",
        "localhost.rebound.test",
        "127.0.0.1.rebound.test:8000",
        "xbaton.example.com",
        "a.baton.example.com",
        "svc.cluster.local",
        "evilsvc.cluster.local",
        "0x7f.1",
        "decode-00",
    ] {
        assert_eq!(of(strange), Some("host_not_allowed"), "{strange}");
    }
    for bent in [
        "",
        ":80",
        "a b",
        "host:port",
        "[::1",
        "a/b",
        "u@127.0.0.1",
        "127.0.0.1:8000:1",
    ] {
        assert_eq!(of(bent), Some("bad_host"), "{bent}");
    }
    let twice = head("GET", "/", &[("host", "localhost"), ("host", "rebound.test")]);
    assert_eq!(code(&guard, &twice), Some("bad_host"));
    let in_uri = head("GET", "http://rebound.test/admin/cluster", &[("host", "localhost")]);
    assert_eq!(code(&guard, &in_uri), Some("host_not_allowed"));
    assert_eq!(code(&guard, &head("GET", "/admin/cluster", &[])), None, "no browser");
    let any = self::guard(&["*"]);
    assert_eq!(code(&any, &head("GET", "/", &[("host", "rebound.test")])), None);
}

#[test]
fn probes_and_metrics_are_answered_under_every_name() {
    for path in ["/health", "/ready", "/ping", "/metrics", "/metrics?name=x"] {
        let probe = head("GET", path, &[("host", "whatever")]);
        assert_eq!(code(&guard(&[]), &probe), None, "{path}");
    }
    let other = head("GET", "/metrics/../admin/cluster", &[("host", "whatever")]);
    assert_eq!(code(&guard(&[]), &other), Some("host_not_allowed"));
}

#[test]
fn writes_of_another_origin_are_refused() {
    let guard = guard(&["baton.example.com"]);
    let write = |headers: &[(&str, &str)]| code(&guard, &head("POST", "/admin/nodes/decode-0/drain", headers));
    let host = ("host", "127.0.0.1:8000");
    assert_eq!(write(&[host]), None, "curl and the SDKs state no origin");
    for own in [
        [host, ("origin", "http://127.0.0.1:8000")],
        [host, ("sec-fetch-site", "same-origin")],
        [host, ("sec-fetch-site", "none")],
        [("host", "baton.example.com"), ("origin", "https://baton.example.com")],
        [
            ("host", "baton.example.com:443"),
            ("origin", "https://Baton.example.com"),
        ],
        [("host", "[::1]:8000"), ("origin", "http://[::1]:8000")],
    ] {
        assert_eq!(write(&own), None, "{own:?}");
    }
    for foreign in [
        [host, ("origin", "http://127.0.0.1:8001")],
        [host, ("origin", "http://localhost:8000")],
        [host, ("origin", "http://127.0.0.1")],
        [host, ("origin", "null")],
        [host, ("origin", "")],
        [host, ("origin", "http://127.0.0.1:8000.evil.test")],
        [host, ("origin", "chrome-extension://abcdef")],
        [host, ("sec-fetch-site", "same-site")],
        [host, ("sec-fetch-site", "cross-site")],
    ] {
        assert_eq!(write(&foreign), Some("foreign_origin"), "{foreign:?}");
    }
    let read = head("GET", "/ui/", &[host, ("sec-fetch-site", "cross-site")]);
    assert_eq!(
        code(&guard, &read),
        None,
        "a link from another page leads to the console"
    );
    let chosen = guard.with_origins(&["https://chat.example.com:443".parse().expect("an origin")]);
    let of = |origin| {
        head(
            "POST",
            "/v1/completions",
            &[host, ("origin", origin), ("sec-fetch-site", "cross-site")],
        )
    };
    assert_eq!(code(&chosen, &of("https://chat.example.com")), None);
    assert_eq!(code(&chosen, &of("http://chat.example.com")), Some("foreign_origin"));
}

#[test]
fn a_write_with_a_body_is_json() {
    let write = |kind: Option<&str>, (name, value): (&str, &str)| {
        let mut headers = vec![(name, value)];
        headers.extend(kind.map(|kind| ("content-type", kind)));
        code(&guard(&[]), &head("POST", "/v1/completions", &headers))
    };
    let body = ("content-length", "12");
    assert_eq!(write(None, ("content-length", "0")), None);
    assert_eq!(write(Some("application/json"), body), None);
    assert_eq!(write(Some("Application/JSON; charset=utf-8"), body), None);
    let refused = Some("unsupported_media_type");
    assert_eq!(write(None, body), refused);
    assert_eq!(write(None, ("transfer-encoding", "chunked")), refused);
    for kind in [
        "text/plain",
        "application/x-www-form-urlencoded",
        "application/grpc",
        "application/jsonp",
    ] {
        assert_eq!(write(Some(kind), body), refused, "{kind}");
    }
}

#[test]
fn settings_that_mean_nothing_are_refused() {
    for bad in ["", "http://x", "x:80", "*.", "a*b", "a/b", "[::1]"] {
        assert!(bad.parse::<HostPattern>().is_err(), "{bad}");
    }
    for bad in [
        "*",
        "null",
        "example.com",
        "http://",
        "http://a/b",
        "http://a:x",
        "http://*.a",
    ] {
        assert!(bad.parse::<WebOrigin>().is_err(), "{bad}");
    }
    let origin: WebOrigin = "HTTP://Example.com:80/".parse().expect("an origin");
    assert_eq!(origin.to_string(), "http://example.com");
    for pattern in ["*", "*.example.com", "example.com"] {
        assert_eq!(pattern.parse::<HostPattern>().expect("a pattern").to_string(), pattern);
    }
}
