//! The collector of spans, where the standard `OTEL_*` variables name one: does anybody take connections there.

use std::time::{Duration, Instant};

use tokio::net::TcpStream;
use url::Url;

use super::finding::{Finding, Group};

const CONNECTS_WITHIN: Duration = Duration::from_secs(2);
/// The first that is set names the collector, as in the specification of OpenTelemetry.
const ENDPOINTS: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"];
const NO_COLLECTOR: &str = "none: each process keeps its last spans (OTEL_EXPORTER_OTLP_ENDPOINT names one)";

pub(super) async fn look(environment: &dyn Fn(&str) -> Option<String>) -> Finding {
    let is_off = environment("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true"))
        || environment("OTEL_TRACES_EXPORTER").is_some_and(|value| value == "none");
    let endpoint = ENDPOINTS.iter().find_map(|name| Some((*name, environment(name)?)));
    let Some((variable, endpoint)) = endpoint.filter(|_| !is_off) else {
        return Group::Collector.not_configured("OTLP", NO_COLLECTOR);
    };
    let url = Url::parse(&endpoint).ok();
    let place = url.as_ref().and_then(|url| {
        // An IPv6 address is in brackets in a URL, and without in a name.
        let host = url.host_str()?.trim_matches(['[', ']']);
        Some((host, url.port_or_known_default()?))
    });
    let Some(place) = place else {
        return Group::Collector.fail(
            "OTLP",
            format!("{variable} is no URL"),
            "write http://HOST:4317 for gRPC, http://HOST:4318 for http/protobuf",
        );
    };
    let (host, port) = place;
    let asked = Instant::now();
    let why = match tokio::time::timeout(CONNECTS_WITHIN, TcpStream::connect(place)).await {
        Ok(Ok(_)) => {
            let ms = asked.elapsed().as_secs_f64() * 1e3;
            return Group::Collector.ok("OTLP", format!("{host}:{port} takes connections, in {ms:.1} ms"));
        }
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("no answer within {} s", CONNECTS_WITHIN.as_secs()),
    };
    Group::Collector.warn(
        "OTLP",
        format!("{host}:{port} of {variable} takes no connection: {why}"),
        format!("start the collector, correct {variable}, or unset it; requests are served without a collector, too"),
    )
}

#[cfg(test)]
mod tests {
    use super::super::finding::Verdict;
    use super::*;

    async fn verdict(variables: &[(&str, &str)]) -> Verdict {
        let environment = |name: &str| {
            let set = variables.iter().find(|(known, _)| *known == name);
            set.map(|(_, value)| (*value).to_owned())
        };
        look(&environment).await.verdict
    }

    #[tokio::test]
    async fn a_collector_is_asked_only_where_spans_would_go() {
        let socket = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}", socket.local_addr().expect("bound"));
        assert_eq!(verdict(&[]).await, Verdict::NotConfigured);
        assert_eq!(verdict(&[("OTEL_EXPORTER_OTLP_ENDPOINT", &url)]).await, Verdict::Ok);
        let off = [
            ("OTEL_EXPORTER_OTLP_ENDPOINT", url.as_str()),
            ("OTEL_SDK_DISABLED", "true"),
        ];
        assert_eq!(verdict(&off).await, Verdict::NotConfigured);
        assert_eq!(verdict(&[("OTEL_EXPORTER_OTLP_ENDPOINT", "here")]).await, Verdict::Fail);
        drop(socket);
        assert_eq!(
            verdict(&[("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", &url)]).await,
            Verdict::Warn
        );
    }
}
