// A certified OpenID provider: `node oidc_provider.mjs RESOURCE on|off` prints its address and serves until it is ended.
// It issues tokens for RESOURCE only, with the scope task:read. Every sign-in is Ann's. With `on` clients can register;
// with `off` the only client is `known`.
import http from "node:http";
import Provider, { errors } from "oidc-provider";

const [resource, registration] = process.argv.slice(2);
const known = {
  client_id: "known",
  application_type: "native",
  token_endpoint_auth_method: "none",
  grant_types: ["authorization_code", "refresh_token"],
  redirect_uris: ["http://127.0.0.1:1/callback"],
};
const server = http.createServer();
server.listen(0, "127.0.0.1", () => {
  const issuer = `http://127.0.0.1:${server.address().port}`;
  const provider = new Provider(issuer, {
    clients: registration === "on" ? [] : [known],
    scopes: ["openid", "offline_access", "task:read"],
    findAccount: (_, id) => ({ accountId: id, claims: async () => ({ sub: id }) }),
    interactions: { url: (_, interaction) => `/interaction/${interaction.uid}` },
    features: {
      devInteractions: { enabled: false },
      registration: { enabled: registration === "on" },
      resourceIndicators: {
        enabled: true,
        useGrantedResource: () => true,
        getResourceServerInfo: (_, indicator) => {
          if (indicator !== resource) throw new errors.InvalidTarget();
          return { scope: "task:read", audience: indicator, accessTokenFormat: "jwt" };
        },
      },
    },
  });

  async function consent({ session, params, prompt, grantId }) {
    const grant = grantId
      ? await provider.Grant.find(grantId)
      : new provider.Grant({ accountId: session.accountId, clientId: params.client_id });
    grant.addOIDCScope((prompt.details.missingOIDCScope ?? []).join(" "));
    for (const [asked, scopes] of Object.entries(prompt.details.missingResourceScopes ?? {}))
      grant.addResourceScope(asked, scopes.join(" "));
    return { consent: { grantId: await grant.save() } };
  }

  const serve = provider.callback();
  server.on("request", async (request, response) => {
    if (!request.url.startsWith("/interaction/")) return serve(request, response);
    const details = await provider.interactionDetails(request, response);
    const result = details.prompt.name === "login" ? { login: { accountId: "ann" } } : await consent(details);
    await provider.interactionFinished(request, response, result);
  });
  console.log(issuer);
});
