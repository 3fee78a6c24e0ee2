//! `/`: a page for people with what the daemon serves.

use std::fmt::Write;

use axum::extract::State;
use axum::response::{Html, IntoResponse, Response};

use super::control::App;
use crate::api::{Status, Target};
use crate::units::{Size, percent};

/// The page.
pub async fn page(State(app): State<App>) -> Response {
    let seen = app.engine.call(async move |engine| Ok((engine.status().await?, engine.list_targets()))).await;
    match seen {
        Ok((status, targets)) => Html(render(&status, &targets)).into_response(),
        Err(failure) => failure.into_response(),
    }
}

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:60em;padding:0 1em}\
    table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.3em .8em .3em 0;\
    border-bottom:1px solid #8884}td.n,th.n{text-align:right}code{font-size:.9em}\
    meter{width:10em}.e{color:#b00}@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}.e{color:#f77}}";

fn render(status: &Status, targets: &[Target]) -> String {
    let mut html = String::new();
    // Writing into a String does not fail.
    let _ = write!(
        html,
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>\
         <meta http-equiv=refresh content=10><title>Forebay</title><style>{STYLE}</style>\
         <h1>Forebay</h1><p>Version {}, process {}, {} core(s) on {}, up {} s, {} connection(s).</p>",
        escape(&status.version),
        status.pid,
        status.cores,
        escape(&status.driver),
        status.uptime_s,
        status.connections,
    );
    html.push_str(
        "<h2>Pools</h2><table><tr><th>Pool<th>Kind<th class=n>Used<th class=n>Capacity<th><th class=n>Objects",
    );
    for pool in &status.pools {
        let _ = write!(
            html,
            "<tr><td>{}<td>{}<td class=n>{}<td class=n>{}<td><meter max={} value={}></meter> {}<td class=n>{}",
            escape(&pool.name),
            escape(&pool.kind),
            Size(pool.used),
            Size(pool.capacity),
            pool.capacity.max(1),
            pool.used,
            percent(pool.used, pool.capacity),
            pool.objects,
        );
    }
    html.push_str("</table>");
    for (pool, why) in status.pools.iter().filter_map(|pool| Some((&pool.name, pool.refuses_writes.as_ref()?))) {
        let _ = write!(html, "<p class=e>{} takes no writes: {}", escape(pool), escape(why));
    }
    html.push_str("<h2>Exports</h2>");
    if targets.is_empty() {
        html.push_str("<p>None yet: <code>forebay attach local/disk1 --nbd</code>");
    } else {
        html.push_str("<table><tr><th>Image<th>URI<th>Access<th class=n>Connections");
        for target in targets {
            let uri = match (&target.error, &target.uri) {
                (Some(failure), _) => format!("<span class=e>{}</span>", escape(&failure.message)),
                (None, Some(uri)) => format!("<code>{}</code>", escape(uri)),
                (None, None) => "not served".to_owned(),
            };
            let _ = write!(
                html,
                "<tr><td>{}/{}<td>{uri}<td>{}<td class=n>{}",
                escape(&target.pool),
                escape(&target.image),
                if target.read_only { "read-only" } else { "read and write" },
                target.connections,
            );
        }
        html.push_str("</table>");
    }
    html.push_str("<p><a href=metrics>Metrics</a> · <a href=openapi.json>API</a></p></html>");
    html
}

fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_of_a_name_becomes_markup() {
        assert_eq!(escape("<b a='1'>&\""), "&lt;b a=&#39;1&#39;&gt;&amp;&quot;");
    }
}
